"""y = x W^T for few rows on Hopper (sm_90), in Gluon: one warp loads, four compute.

skinny_gemm: stream-K over the weights' units, an equal contiguous share for each program.
  unit      BLOCK_N rows of W by BLOCK_K columns; units of a tile of rows are consecutive, so that a
            program's share is whole tiles and at most two partial tiles
  grid      any number of programs; no program waits for another
  load warp fills the ring with weights before it waits for the preceding kernel, on which they do
            not depend.  Then x, in a ring of its own, since it comes from L2
  compute   four warps: W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M] by wgmma, so that the
            rows of x, padded to at least 8, are the N side; float32 accumulation
  fold      wgmma has 64 rows: for a tile with fewer, FOLD column runs of a unit are stacked in W's
            rows and in x's, and the products of different runs are discarded
  parts     partial sums of split tiles go to a workspace; the last program to arrive adds them in
            the order of the columns: deterministic
  reads     W [N, K] and x [M, K], bf16 or fp16, rows 16-byte aligned, M <= BLOCK_M; bias [N] or
            None
  writes    y [M, N], contiguous
  bound     memory: 2 * N * K bytes
  checked   tests/model_zoo/layers/gemm/test_gemm.py on a GPU, against float64
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

from attention.common.hopper import cta_barrier

AT_ONCE = gl.constexpr(16)  # elements that a thread loads at once when it adds partial sums


@gluon.jit
def _share(N, k_blocks, split_units, BLOCK_N: gl.constexpr):
    """-> (the program's first unit, its units); shares begin at multiples of split_units."""
    chunks = gl.cdiv(N, BLOCK_N) * k_blocks // split_units
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin = program * chunks // programs * split_units
    return begin, (program + 1) * chunks // programs * split_units - begin


@gluon.jit
def _copy(tma_desc, tiles, full, first, unit, slot, k_blocks, FOLD: gl.constexpr):
    """Start the copy of rows from `first` on: FOLD stacked column runs of a unit."""
    ROWS: gl.constexpr = tma_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = tma_desc.block_type.shape[1]
    mbarrier.expect(full.index(slot), FOLD * tma_desc.block_type.nbytes)
    column = unit % k_blocks * (FOLD * COLUMNS)
    for j in gl.static_range(FOLD):
        tma.async_copy_global_to_shared(
            tma_desc, [first, column + j * COLUMNS], full.index(slot),
            tiles.index(slot).slice(j * ROWS, ROWS, 0),
        )  # fmt: skip


@gluon.jit
def _load(
    w_desc, x_desc, weights, rows, w_full, x_full, empty, N, k_blocks, split_units,
    FOLD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp.  It fills its ring of weights before the wait."""
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    begin, count = _share(N, k_blocks, split_units, BLOCK_N)
    filled = gl.minimum(count, STAGES)
    for i in range(filled):
        unit = begin + i
        _copy(w_desc, weights, w_full, unit // k_blocks * BLOCK_N, unit, i, k_blocks, FOLD)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for i in range(gl.minimum(count, X_STAGES)):
        _copy(x_desc, rows, x_full, 0, begin + i, i, k_blocks, FOLD)
    for i in range(count - X_STAGES):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES) & 1)  # both rings have room
        _copy(x_desc, rows, x_full, 0, begin + i + X_STAGES, i % X_STAGES, k_blocks, FOLD)
        if i + STAGES < count:
            unit = begin + i + STAGES
            row = unit // k_blocks * BLOCK_N
            _copy(w_desc, weights, w_full, row, unit, stage, k_blocks, FOLD)


@gluon.jit
def _unfold(acc, FOLD: gl.constexpr):
    """Sum over column runs j of the product of run j of W with run j of x."""
    if FOLD > 1:
        HEIGHT: gl.constexpr = acc.shape[0] // FOLD
        WIDTH: gl.constexpr = acc.shape[1] // FOLD
        r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)) // HEIGHT
        c = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)) // WIDTH
        acc = gl.where(r[:, None] == c[None, :], acc, 0.0)
        acc = gl.sum(acc.reshape([FOLD, HEIGHT, FOLD, WIDTH]), 2)
        acc = gl.sum(acc, 0)
    return acc


@gluon.jit
def _write(acc, OUT, BIAS, n, m, M, N):
    """y of a tile; n [BLOCK_N], m [BLOCK_M]."""
    if BIAS is not None:
        acc += gl.load(BIAS + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    at = OUT + m[None, :] * N + n[:, None]
    gl.store(at, acc.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@gluon.jit
def _write_part(
    acc, whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
):  # fmt: skip
    """Store y of a whole tile, or a partial sum; the last to arrive stores y of a split tile."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout))
    n = tile * BLOCK_N + r
    if whole:
        _write(acc, OUT, BIAS, n, m, M, N)
    else:
        within = PARTS + r[:, None] * BLOCK_M + m[None, :]
        real = (m < M)[None, :] & (n < N)[:, None]
        gl.store(within + slot.to(gl.int64) * (BLOCK_N * BLOCK_M), acc, mask=real)
        chunks, programs = gl.cdiv(N, BLOCK_N) * k_blocks // split_units, gl.num_programs(0)
        # The programs that have the tile's first and last units.
        first = ((tile * (k_blocks // split_units) + 1) * programs - 1) // chunks
        last = ((tile + 1) * (k_blocks // split_units) * programs - 1) // chunks
        cta_barrier()
        arrived = gl.atomic_add(ARRIVED + tile, 1)
        if arrived == last - first:
            TOGETHER: gl.constexpr = max(1, AT_ONCE * 128 // (BLOCK_N * BLOCK_M))
            total = gl.zeros_like(acc)
            for j in range(gl.cdiv(last - first + 1, TOGETHER)):
                for i in gl.static_range(TOGETHER):
                    program = first + j * TOGETHER + i
                    # Slots as in _compute: only the first program begins at the tile's start.
                    place = 2 * program + (program == first).to(gl.int32)
                    total += gl.load(
                        within + place.to(gl.int64) * (BLOCK_N * BLOCK_M),
                        mask=real & (program <= last), other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
            _write(total, OUT, BIAS, n, m, M, N)
            gl.store(ARRIVED + tile, 0)  # for the next GEMM


@gluon.jit
def _compute(
    weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
    FOLD: gl.constexpr,
):  # fmt: skip
    """Four warps: wgmma over the units, and the epilogue of each tile."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = rows.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    begin, count = _share(N, k_blocks, split_units, HEIGHT // FOLD)
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    for i in range(count):
        unit = begin + i
        block = unit % k_blocks
        stage = i % STAGES
        mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
        mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
        product = warpgroup_mma(
            weights.index(stage), rows.index(i % X_STAGES).permute((1, 0)), acc,
            use_acc=(block != 0) & (i != 0), is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        if (block == k_blocks - 1) | (i == count - 1):
            starts = i >= block  # whether the program has the tile's first unit
            slot = 2 * gl.program_id(0) + starts.to(gl.int32)
            _write_part(
                _unfold(acc, FOLD), starts & (block == k_blocks - 1), unit // k_blocks, slot,
                PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "k_blocks", "split_units"])
def _skinny_gemm(
    w_desc, x_desc, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
    FOLD: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = FOLD * w_desc.block_type.shape[0]
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, COLUMNS], swizzled)
    rows = gl.allocate_shared_memory(w_desc.dtype, [X_STAGES, WIDTH, COLUMNS], swizzled)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks,
                split_units, FOLD,
            )),
            (_load, (
                w_desc, x_desc, weights, rows, w_full, x_full, empty, N, k_blocks, split_units,
                FOLD, DEPENDENT,
            )),
        ],
        [1], [40],
    )  # fmt: skip
