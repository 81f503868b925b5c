"""Products of many rows on Hopper (sm_90), in Gluon: y = x W^T, and silu(gate) * up of them.

tile_hopper
  grid      one program a multiprocessor, or fewer if there are fewer tiles; a program takes every
            so many-th tile.  Tiles of a group of rows follow each other down the rows, so that the
            programs that run together read the same few rows of W, and x stays in the L2 cache
  warps     one loads x and W by TMA into a ring of stages, running ahead into the next tile; two
            groups of four multiply half of the tile's rows each, the first LEAD stages ahead of
            the second: while one finishes its part of a tile the other has the tensor cores
  gated     half of a tile's COLUMNS are gates and half are what they let through, from rows of W
            that lie `apart`: both sums of an output are in the same thread
  reads     x [M, K], W [N, K], bf16 or fp16, rows 16-byte aligned; W before the kernel waits for
            those before it
  writes    y [M, N], or silu(gate) * up [M, N / 2], rows 16-byte aligned, by TMA
  math      float32 sums, and silu of them, rounded once
  bound     compute: 2 * M * N * K floating-point operations
  checked   tests/model_zoo/test_tiled_products.py on a GPU, against float64
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

CONSUMERS = gl.constexpr(2)  # groups of four warps that multiply
DEPTH = gl.constexpr(64)  # columns of a stage: 128 bytes, the widest swizzle
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(tile, m_tiles, n_tiles, group):
    """(row of tiles, column of tiles) of the tile-th one."""
    before = tile // (group * n_tiles) * group
    height = gl.minimum(m_tiles - before, group)
    within = tile - before * n_tiles
    return before + within % height, within // height


@gluon.jit
def _copy_weights(boxes, weights, full, stage, row, apart, k):
    """Start the copies of both halves of a tile's rows of W."""
    HALF: gl.constexpr = boxes.block_type.shape[0]
    column = k * DEPTH
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            boxes, [row + half * apart, column], full.index(stage),
            weights.index(stage).slice(half * HALF, HALF, 0),
        )  # fmt: skip


@gluon.jit
def _copy_rows(boxes, rows, full, stage, row, k):
    """Start the copies of each consumer's rows of x."""
    ROWS: gl.constexpr = boxes.block_type.shape[0]
    for g in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            boxes, [row + g * ROWS, k * DEPTH], full.index(stage),
            rows.index(stage * CONSUMERS + g),
        )  # fmt: skip


@gluon.jit
def _load(
    x_boxes, w_boxes, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, group, step, apart,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp.  Its ring has weights before anything has to be waited for."""
    STAGES: gl.constexpr = weights.shape[0]
    HEIGHT: gl.constexpr = CONSUMERS * x_boxes.block_type.shape[0]
    BYTES: gl.constexpr = CONSUMERS * x_boxes.block_type.nbytes + 2 * w_boxes.block_type.nbytes
    first = gl.program_id(0)
    m, n = _place(first, m_tiles, n_tiles, group)
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), BYTES)
        _copy_weights(w_boxes, weights, full, stage, n * step, apart, stage)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _copy_rows(x_boxes, rows, full, stage, m * HEIGHT, stage)
    stage, phase = 0, 0
    for tile in range(first, m_tiles * n_tiles, gl.num_programs(0)):
        m, n = _place(tile, m_tiles, n_tiles, group)
        begin = STAGES * (tile == first).to(gl.int32)
        for k in range(begin, k_blocks):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            _copy_rows(x_boxes, rows, full, stage, m * HEIGHT, k)
            _copy_weights(w_boxes, weights, full, stage, n * step, apart, k)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns; no number changes its thread."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _write(y, out_boxes, results, row, column):
    """Rows and columns that y has not are left out."""
    tma.store_wait(pendings=0)  # what was written before has been read
    results.store(y.to(out_boxes.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_boxes, [row, column], results)


@gluon.jit
def _silu(x):
    """x / (1 + exp(-x)), by an approximate reciprocal: 1 unit in the last place or two of float32.

    A division also serves denominators past 2^126, where the answer is as good as zero.
    """
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * -LOG2E)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _finish(acc, out_boxes, results, row, n, GATED: gl.constexpr):
    HALF: gl.constexpr = acc.shape[1] // 2
    left, right = _halves(acc)
    if GATED:
        _write(_silu(left) * right, out_boxes, results, row, n * HALF)
    else:
        _write(left, out_boxes, results, row, n * (2 * HALF))
        _write(right, out_boxes, results, row, n * (2 * HALF) + HALF)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    return (stage + (STAGES - 1)) % STAGES


@gluon.jit
def _multiply(
    rows, weights, results, full, empty, turn, out_boxes, m_tiles, n_tiles, k_blocks, group,
    g: gl.constexpr, LEAD: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Four warps: ROWS rows of each tile."""
    STAGES: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    stage, phase, turns = 0, 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        if LEAD > 0 and g == 1:
            mbarrier.wait(turn, turns)
            turns ^= 1
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for k in range(k_blocks):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                rows.index(stage * CONSUMERS + g), weights.index(stage).permute((1, 0)), acc,
                use_acc=k != 0, is_async=True,
            )  # fmt: skip
            # The product before this one has ended: its stage may be filled again.  (A variable
            # that is set to `stage` would stay as it is: the loop takes both for the same.)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=k != 0)
            if LEAD > 0 and g == 0:
                mbarrier.arrive(turn, count=1, pred=k == LEAD - 1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
        m, n = _place(tile, m_tiles, n_tiles, group)
        _finish(acc, out_boxes, results.index(g), (m * CONSUMERS + g) * ROWS, n, GATED)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["m_tiles", "n_tiles", "k_blocks", "group", "step", "apart"])
def tile_hopper(
    x_boxes, w_boxes, out_boxes, m_tiles, n_tiles, k_blocks, group, step, apart,
    STAGES: gl.constexpr, LEAD: gl.constexpr, GATED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_boxes.block_type.shape[0]
    HALF: gl.constexpr = w_boxes.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x_boxes.dtype
    rows = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, DEPTH], swizzled)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * HALF, DEPTH], swizzled)
    results = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HALF], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, full, empty, turn, out_boxes, m_tiles, n_tiles, k_blocks,
                group, 0, LEAD, GATED,
            )),
            (_multiply, (
                rows, weights, results, full, empty, turn, out_boxes, m_tiles, n_tiles, k_blocks,
                group, 1, LEAD, GATED,
            )),
            (_load, (
                x_boxes, w_boxes, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, group,
                step, apart, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
