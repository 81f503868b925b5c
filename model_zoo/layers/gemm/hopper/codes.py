"""Outputs in fp8 with scales of 1 x 64 columns, between GEMMs of few rows on Hopper (sm_90).

The epilogue of a GEMM has whole tiles of its output, 64 columns or more of each row, of which it
knows the largest value: it can store codes, and no kernel has to read the row again.

Scales are in the order of the units of the GEMM that reads them: of a unit of FOLD column runs,
STEPS x 64 columns each, scale k of run j of row m is at [unit * STEPS + k, j * BLOCK_M + m].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_COLUMNS = gl.constexpr(64)
LARGEST = gl.constexpr(448.0)  # of e4m3
LEAST = gl.constexpr(1e-10)  # in place of a largest value of 0


@gluon.jit
def write_codes(
    y, CODES, SCALES, tile, M, N, FOLD: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """y [R, BLOCK_M] float32, columns tile * R .. of each row -> codes [M, N] and scales.

    R: 64 or a multiple of it; FOLD, STEPS: of the GEMM that reads them
    """
    R: gl.constexpr = y.shape[0]
    BLOCK_M: gl.constexpr = y.shape[1]
    n = tile * R + gl.arange(0, R, gl.SliceLayout(1, y.type.layout))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, y.type.layout))
    y = gl.where((n < N)[:, None], y, 0.0)
    largest = gl.maximum(gl.max(gl.maximum(y, -y), 0), LEAST)
    codes = (y * (1.0 / largest * LARGEST)[None, :]).to(gl.float8e4nv)
    # Column 16 u + 8 i + 2 t + e of a block of 64 is byte 16 t + 4 u + 2 e + i.
    byte = n // 64 * 64 + n // 2 % 4 * 16 + n // 16 % 4 * 4 + n % 2 * 2 + n // 8 % 2
    real = (m < M)[None, :]
    gl.store(CODES + m[None, :] * N + byte[:, None], codes, mask=(n < N)[:, None] & real)
    for k in gl.static_range(R // TILE_COLUMNS):
        block = tile * (R // TILE_COLUMNS) + k
        run = block // STEPS
        row = run // FOLD * STEPS + block % STEPS
        at = SCALES + row * (FOLD * BLOCK_M) + run % FOLD * BLOCK_M + m
        gl.store(at, largest / LARGEST)
