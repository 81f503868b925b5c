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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.softmax import LOG2E

GROUPS = gl.constexpr(2)  # consumer warpgroups
ROWS = gl.constexpr(64)  # of x per consumer warpgroup
HALF = gl.constexpr(128)  # gates of a tile
DEPTH = gl.constexpr(64)  # columns of a stage: 128 bytes, the widest swizzle
STAGES = gl.constexpr(4)


@gluon.jit
def _tile_coords(tile, m_tiles, n_tiles, band):
    """Tile index -> (row, column) of tiles; `band` rows of tiles at a time."""
    before = tile // (band * n_tiles) * band
    height = gl.minimum(m_tiles - before, band)
    within = tile - before * n_tiles
    return before + within % height, within // height


@gluon.jit
def _copy_weights(tma_desc, weights, full, stage, row, up_offset, k):
    """Start the copies of a tile's rows of W: gates, followed by ups."""
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            tma_desc, [row + half * up_offset, k * DEPTH], full.index(stage),
            weights.index(stage).slice(half * HALF, HALF, 0),
        )  # fmt: skip


@gluon.jit
def _copy_rows(tma_desc, rows, full, stage, row, k):
    """Start the copies of each group's rows of x."""
    for g in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            tma_desc, [row + g * ROWS, k * DEPTH], full.index(stage), rows.index(stage * GROUPS + g)
        )


@gluon.jit
def _load(
    x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band, up_offset,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp.  It fills its ring with weights before the wait."""
    BYTES: gl.constexpr = GROUPS * x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes
    HEIGHT: gl.constexpr = GROUPS * ROWS
    first = gl.program_id(0)
    m, n = _tile_coords(first, m_tiles, n_tiles, band)
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), BYTES)
        _copy_weights(w_desc, weights, full, stage, n * HALF, up_offset, stage)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _copy_rows(x_desc, rows, full, stage, m * HEIGHT, stage)
    stage, phase = 0, 0
    for tile in range(first, m_tiles * n_tiles, gl.num_programs(0)):
        m, n = _tile_coords(tile, m_tiles, n_tiles, band)
        begin = STAGES * (tile == first).to(gl.int32)
        for k in range(begin, k_blocks):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            _copy_rows(x_desc, rows, full, stage, m * HEIGHT, k)
            _copy_weights(w_desc, weights, full, stage, n * HALF, up_offset, k)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _silu(x):
    """x / (1 + exp(-x)), by an approximate reciprocal: a unit or two in the last place of float32.

    A division also serves denominators past 2^126, where the result is practically zero.
    """
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * -LOG2E)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _finish(acc, out_desc, results, row, column):
    """silu(gate) * up of a group's sums; rows and columns out of bounds are not stored."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # No element changes its thread.
    gate, up = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    y = gl.convert_layout(_silu(gate) * up, layout)
    tma.store_wait(pendings=0)  # the previous tile has been read
    results.store(y.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], results)


@gluon.jit
def _release_before(empty, stage, there):
    """Release the stage before `stage`.

    Not by a variable that keeps the previous `stage`: Triton merges the two and does not carry it
    through the loop.
    """
    mbarrier.arrive(empty.index((stage + (STAGES - 1)) % STAGES), count=1, pred=there)


@gluon.jit
def _multiply(
    rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band,
    g: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: ROWS rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 16])
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, 2 * HALF], gl.float32, layout)
        for k in range(k_blocks):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                rows.index(stage * GROUPS + g), weights.index(stage).permute((1, 0)), acc,
                use_acc=k != 0, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            _release_before(empty, stage, k != 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        _release_before(empty, stage, True)
        m, n = _tile_coords(tile, m_tiles, n_tiles, band)
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
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band, 0,
            )),
            (_multiply, (
                rows, weights, results, full, empty, out_desc, m_tiles, n_tiles, k_blocks, band, 1,
            )),
            (_load, (
                x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band,
                up_offset, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
