"""Parts of persistent GEMMs of many rows on Hopper (sm_90), in Gluon.

A tile is 128 rows of x by 256 rows of W.  One warp loads both by TMA into a ring of stages, running
ahead into the next tile; two consumer warpgroups multiply half of a tile's rows of x each.  What
becomes of the sums is up to the kernel.

    tile_coords     where a tile is
    load            all copies of x and W: what the load warp does
    tile_sums       the sums of a consumer warpgroup's rows of a tile
    stage_barriers  those that say that a stage is full, and empty
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

GROUPS = gl.constexpr(2)  # consumer warpgroups
ROWS = gl.constexpr(64)  # of x per consumer warpgroup
HALF = gl.constexpr(128)  # of a tile's rows of W, which are copied in two halves
DEPTH = gl.constexpr(64)  # columns of 16 bits of a stage: 128 bytes, the widest swizzle


@gluon.jit
def tile_coords(tile, m_tiles, n_tiles, band):
    """Tile index -> (row, column) of tiles; `band` rows of tiles at a time."""
    before = tile // (band * n_tiles) * band
    height = gl.minimum(m_tiles - before, band)
    within = tile - before * n_tiles
    return before + within % height, within // height


@gluon.jit
def _copy_weights(tma_desc, weights, full, stage, row, half_offset, k):
    """Start the copies of a tile's rows of W, whose halves begin half_offset rows apart."""
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            tma_desc, [row + half * half_offset, k * tma_desc.block_type.shape[1]],
            full.index(stage),
            weights.index(stage).slice(half * HALF, HALF, 0),
        )  # fmt: skip


@gluon.jit
def _copy_rows(tma_desc, rows, full, stage, row, k):
    """Start the copies of each group's rows of x."""
    for g in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            tma_desc, [row + g * ROWS, k * tma_desc.block_type.shape[1]], full.index(stage),
            rows.index(stage * GROUPS + g),
        )  # fmt: skip


@gluon.jit
def load(
    x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band, half_offset,
    STEP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp.  It fills its ring with weights before the wait.

    half_offset  rows of W between the starts of a tile's halves
    STEP         rows of W between the starts of tiles
    """
    STAGES: gl.constexpr = weights.shape[0]
    BYTES: gl.constexpr = GROUPS * x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes
    HEIGHT: gl.constexpr = GROUPS * ROWS
    first = gl.program_id(0)
    m, n = tile_coords(first, m_tiles, n_tiles, band)
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), BYTES)
        _copy_weights(w_desc, weights, full, stage, n * STEP, half_offset, stage)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _copy_rows(x_desc, rows, full, stage, m * HEIGHT, stage)
    stage, phase = 0, 0
    for tile in range(first, m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        begin = STAGES * (tile == first).to(gl.int32)
        for k in range(begin, k_blocks):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            _copy_rows(x_desc, rows, full, stage, m * HEIGHT, k)
            _copy_weights(w_desc, weights, full, stage, n * STEP, half_offset, k)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _release_before(empty, stage, there, STAGES: gl.constexpr):
    """Release the stage before `stage`.

    Not by a variable that keeps the previous `stage`: Triton merges the two and does not carry it
    through the loop.
    """
    mbarrier.arrive(empty.index((stage + (STAGES - 1)) % STAGES), count=1, pred=there)


@gluon.jit
def tile_sums(rows, weights, full, empty, stage, phase, k_blocks, g: gl.constexpr):
    """-> (sums [ROWS, 2 HALF] of group g's rows of a tile, and the ring's next stage and phase)."""
    STAGES: gl.constexpr = weights.shape[0]
    DEPTH_OF_MMA: gl.constexpr = rows.shape[2] // 4  # 32 bytes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, DEPTH_OF_MMA])
    acc = gl.zeros([ROWS, 2 * HALF], gl.float32, layout)
    for k in range(k_blocks):
        mbarrier.wait(full.index(stage), phase)
        acc = warpgroup_mma(
            rows.index(stage * GROUPS + g), weights.index(stage).permute((1, 0)), acc,
            use_acc=k != 0, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        _release_before(empty, stage, k != 0, STAGES)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    _release_before(empty, stage, True, STAGES)
    return acc, stage, phase


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = GROUPS):
    """-> (full, empty): a stage is full when its copies have arrived, and empty once each of its
    READERS has released it: the groups, which multiply it, and a warp that follows the loads."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    fence_async_shared()
    return full, empty
