"""The norm between two GEMMs of few rows on Hopper (sm_90), in Gluon.

The first GEMM adds its output to the residual and stores the sum times the norm's weight; the
second one multiplies its output by 1 / rms of the sum, which is the same for all columns of a row.

output_layout  of a tile's output: as many of a row's columns a thread as one instruction stores
load_residual  what the epilogue of the first GEMM reads: loaded before a tile's products, or after
               them where registers are few
add_residual   that epilogue
inverse_rms    1 / rms of the rows, from sums of squares that the first GEMM has stored
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AT_ONCE = gl.constexpr(16)  # sums of squares that a thread loads at once


@gluon.constexpr_function
def output_layout(height, block_m):
    """Of y^T [height, block_m] in 16 bits, for four warps."""
    columns = min(8, height * block_m // 128)
    lanes = min(32, height // columns)
    return gl.BlockedLayout([columns, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.jit
def load_residual(RESIDUAL, NORM, tile, adds, M, N, HEIGHT: gl.constexpr, BLOCK_M: gl.constexpr):
    """-> (residual [HEIGHT, BLOCK_M], the norm's weight [HEIGHT]) of a tile's columns.

    Unless `adds` is 0, in which case nothing is read.
    """
    layout: gl.constexpr = output_layout(HEIGHT, BLOCK_M)
    n = tile * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    there = (n < N) & (adds != 0)
    residual = gl.load(
        RESIDUAL + m[None, :] * N + n[:, None], mask=there[:, None] & (m < M)[None, :], other=0.0
    )
    return residual, gl.load(NORM + n, mask=there, other=0.0)


@gluon.jit
def add_residual(y, at, inside, residual, weight, plus_one, WEIGHTED, SQUARES, tile, m, M):
    """-> y + residual, as PyTorch rounds; stores it times the weight, and sums of its squares.

    y: float32, but rounded, or a sum of such over ranks; plus_one: 1 if weight + 1 multiplies, or 0
    """
    dtype: gl.constexpr = residual.dtype
    total = (residual.to(gl.float32) + y).to(dtype)
    wide = gl.where(inside, total.to(gl.float32), 0.0)
    gl.store(SQUARES + tile * M + m, gl.sum(wide * wide, 0), mask=m < M)
    factor = weight.to(gl.float32) + plus_one
    gl.store(WEIGHTED + at, (wide * factor[:, None]).to(dtype), mask=inside)
    return total


@gluon.jit
def inverse_rms(SQUARES, tiles, M, K, eps, layout: gl.constexpr, BLOCK_M: gl.constexpr):
    """SQUARES [tiles, M] -> [BLOCK_M] float32; all 1 if there are no tiles.

    The tiles' sums are added in one order for a BLOCK_M.
    """
    factor = gl.full([BLOCK_M], 1.0, gl.float32, layout)
    if tiles != 0:
        CHUNK: gl.constexpr = AT_ONCE * 128 // BLOCK_M
        LANES: gl.constexpr = min(32, BLOCK_M)
        by_tile: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
        t = gl.arange(0, CHUNK, gl.SliceLayout(1, by_tile))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, by_tile))
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, by_tile))
        for i in range(gl.cdiv(tiles, CHUNK)):
            tile = i * CHUNK + t
            there = (tile < tiles)[:, None] & (m < M)[None, :]
            sums = gl.load(SQUARES + tile[:, None] * M + m[None, :], mask=there, other=0.0)
            total += gl.sum(sums, 0)
        factor = gl.convert_layout(gl.rsqrt(total / K + eps), layout)
    return factor
