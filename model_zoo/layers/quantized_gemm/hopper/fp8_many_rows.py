"""y = x W^T of many rows, both in fp8, on Hopper (sm_90), in Gluon; also with a gate.

fp8_many_rows
  grid      persistent: tiles, warps and the ring of stages as in gemm/hopper/many_rows.py
  reads     codes of x [M, K] and W [N, K], e4m3, rows 16-byte aligned; W_SCALES [N] of any
            floating-point type, X_SCALES [M] float32; W before the wait for the preceding kernel
  GATE      W has N / 2 gates and N / 2 ups: y is silu(gate) * up or gelu(gate) * up
  writes    y [M, N], or [M, N / 2] with GATE, bf16 or fp16, by TMA
  math      products are added as the tensor cores do, with fewer bits than float32 has
            (torch._scaled_mm with use_fast_accum); then scales of rows and of columns; with GATE
            nothing is rounded before the product
  bound     compute: 2 * M * N * K floating-point operations
  checked   tests/model_zoo/layers/quantized_gemm/test_fp8_many_rows.py on a GPU
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from model_zoo.layers.gemm.hopper.gate import activation
from model_zoo.layers.gemm.hopper.many_rows import (
    GROUPS,
    HALF,
    ROWS,
    load,
    stage_barriers,
    tile_coords,
    tile_sums,
)

STAGES = gl.constexpr(4)
DEPTH = gl.constexpr(128)  # columns of a stage


@gluon.jit
def _scaled(sums, of_x, W_SCALES, first, N):
    """sums [ROWS, HALF] times the scales of x's rows, and those of W's rows from `first` on."""
    n = first + gl.arange(0, HALF, gl.SliceLayout(0, sums.type.layout))
    of_w = gl.load(W_SCALES + gl.minimum(n, N - 1)).to(gl.float32)
    return sums * of_x[:, None] * of_w[None, :]


@gluon.jit
def _store(y, out_desc, results, row, column):
    """y [ROWS, HALF]; rows and columns out of bounds are not stored."""
    tma.store_wait(pendings=0)  # what was stored before has been read
    results.store(y.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], results)


@gluon.jit
def _finish(
    acc, out_desc, results, X_SCALES, W_SCALES, M, N, row, column, half_offset, GATE: gl.constexpr
):
    """y of a group's sums [ROWS, 2 HALF], of W's rows from `column` and column + half_offset on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    # No element changes its thread.
    left, right = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    left, right = gl.convert_layout(left, layout), gl.convert_layout(right, layout)
    m = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    of_x = gl.load(X_SCALES + gl.minimum(m, M - 1))
    y = _scaled(left, of_x, W_SCALES, column, N)
    second = _scaled(right, of_x, W_SCALES, column + half_offset, N)
    if GATE == "":
        _store(y, out_desc, results, row, column)
        _store(second, out_desc, results, row, column + half_offset)
    else:
        _store(activation(y, GATE) * second, out_desc, results, row, column)


@gluon.jit
def _multiply(
    rows, weights, results, full, empty, out_desc, X_SCALES, W_SCALES, M, N, m_tiles, n_tiles,
    k_blocks, band, half_offset, STEP: gl.constexpr, GATE: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: ROWS rows of each tile."""
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        acc, stage, phase = tile_sums(rows, weights, full, empty, stage, phase, k_blocks, g)
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        _finish(
            acc, out_desc, results.index(g), X_SCALES, W_SCALES, M, N, (m * GROUPS + g) * ROWS,
            n * STEP, half_offset, GATE,
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "N", "m_tiles", "n_tiles", "k_blocks", "band", "half_offset"])
def fp8_many_rows(
    x_desc, w_desc, out_desc, X_SCALES, W_SCALES, M, N, m_tiles, n_tiles, k_blocks, band,
    half_offset, GATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GATE: "silu", "gelu" or "".

    half_offset  rows of W between those of a tile's halves: N / 2 with GATE, else HALF
    """
    STEP: gl.constexpr = 2 * HALF if GATE == "" else HALF
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    of_results: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, ROWS, DEPTH], swizzled)
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * HALF, DEPTH], swizzled)
    results = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, ROWS, HALF], of_results)
    full, empty = stage_barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, full, empty, out_desc, X_SCALES, W_SCALES, M, N, m_tiles,
                n_tiles, k_blocks, band, half_offset, STEP, GATE, 0,
            )),
            (_multiply, (
                rows, weights, results, full, empty, out_desc, X_SCALES, W_SCALES, M, N, m_tiles,
                n_tiles, k_blocks, band, half_offset, STEP, GATE, 1,
            )),
            (load, (
                x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band,
                half_offset, STEP, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
