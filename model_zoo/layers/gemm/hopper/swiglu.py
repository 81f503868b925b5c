"""Fused SwiGLU GEMM of many rows on Hopper (sm_90), in Gluon: silu(gate) * up in the epilogue.

swiglu_gemm_hopper
  grid      persistent, one CTA per SM or fewer; program p runs tiles p, p + programs and so on.
            Tiles of a band are ordered down its rows, so that concurrent programs read the same
            few rows of W, and x stays in the L2 cache
  tile      128 rows of x by 128 gates and their 128 ups, whose rows of W are `up_offset` after the
            gates': both sums of an output are in the same thread
  warps     one loads x and W by TMA into a ring of stages, running ahead into the next tile; two
            consumer warpgroups compute half of a tile's rows each
  reads     x [M, K], W [2 I, K], bf16 or fp16, rows 16-byte aligned; W before the wait
            for the preceding kernel
  writes    silu(gate) * up [M, I], rows 16-byte aligned, by TMA
  math      float32 sums, and silu of them, rounded once
  bound     compute: 4 * M * I * K floating-point operations
  checked   tests/model_zoo/layers/gemm/test_swiglu.py on a GPU, against float64
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from model_zoo.layers.gemm.hopper.gate import activation
from model_zoo.layers.gemm.hopper.many_rows import (
    DEPTH,
    GROUPS,
    HALF,
    ROWS,
    load,
    stage_barriers,
    tile_coords,
    tile_sums,
)

STAGES = gl.constexpr(4)


@gluon.jit
def _finish(acc, out_desc, results, row, column):
    """silu(gate) * up of a group's sums; rows and columns out of bounds are not stored."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # No element changes its thread.
    gate, up = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    y = gl.convert_layout(activation(gate, "silu") * up, layout)
    tma.store_wait(pendings=0)  # the previous tile has been read
    results.store(y.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], results)


@gluon.jit
def _multiply(
    rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band,
    g: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: ROWS rows of each tile."""
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        acc, stage, phase = tile_sums(rows, weights, full, empty, stage, phase, k_blocks, g)
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        _finish(acc, out_desc, results.index(g), (m * GROUPS + g) * ROWS, n * HALF)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["m_tiles", "n_tiles", "k_blocks", "band", "up_offset"])
def swiglu_gemm_hopper(
    x_desc, w_desc, out_desc, m_tiles, n_tiles, k_blocks, band, up_offset,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x_desc.dtype
    rows = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, DEPTH], swizzled)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * HALF, DEPTH], swizzled)
    results = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, HALF], swizzled)
    full, empty = stage_barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band, 0,
            )),
            (_multiply, (
                rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band, 1,
            )),
            (load, (
                x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band,
                up_offset, HALF, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
