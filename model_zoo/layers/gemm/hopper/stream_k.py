"""Parts of stream-K GEMMs of few rows on Hopper (sm_90), in Gluon.

A unit is BLOCK_N rows of W by BLOCK_K columns; the units of a tile of rows are consecutive, and
each program has an equal contiguous share of them.  How units are multiplied is up to the kernel.

    share        which units a program has
    tile_units   which of them are of a tile
    wait_for_room  until another unit of W may be asked for
    copy         the copies of a unit into shared memory, by TMA
    copy_rows    those of a unit of a weight, which may be gated
    load_weights  all copies of W, unless scales come with them: what a warp of its own does
    load_x       all copies of x: what another one does
    unfold       the sums of a tile whose column runs were stacked in its rows
    add_runs     the same, where each run was multiplied with its own columns of x alone
    write_part   y of a tile, or a partial sum, which the last program to arrive adds to the others
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.hopper import cta_barrier
from model_zoo.layers.gemm.hopper.gate import gate_mul, tile_row
from model_zoo.layers.gemm.hopper.norm import add_residual, output_layout
from model_zoo.layers.gemm.hopper.rank_sum import receive_tile, send_tile

AT_ONCE = gl.constexpr(16)  # elements that a thread loads at once when it adds partial sums


@gluon.jit
def share(N, k_blocks, split_units, BLOCK_N: gl.constexpr):
    """-> (the program's first unit, its units); shares begin at multiples of split_units."""
    chunks = gl.cdiv(N, BLOCK_N) * k_blocks // split_units
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin = program * chunks // programs * split_units
    return begin, (program + 1) * chunks // programs * split_units - begin


@gluon.jit
def tile_units(tile, begin, end, k_blocks):
    """-> (start, stop, has_first, is_whole): a tile's units of a program that has begin .. end.

    has_first, is_whole: whether the tile's first unit, and all of its units, are among them
    """
    first, last = tile * k_blocks, (tile + 1) * k_blocks
    start, stop = gl.maximum(first, begin), gl.minimum(last, end)
    return start, stop, start == first, (start == first) & (stop == last)


@gluon.jit
def wait_for_room(w_full, empty, i, ahead, STAGES: gl.constexpr):
    """Until W's ring has room for unit i, and fewer than `ahead` units are on their way.

    More of them would not come sooner, and delay what kernels before and after this one read.
    ahead  1 to STAGES
    """
    if i >= ahead:
        before = i - ahead
        mbarrier.wait(w_full.index(before % STAGES), (before // STAGES) & 1)
    if i >= STAGES:
        mbarrier.wait(empty.index(i % STAGES), (i // STAGES - 1) & 1)


@gluon.jit
def copy(tma_desc, tiles, full, first, unit, slot, k_blocks, FOLD: gl.constexpr):
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
def copy_rows(
    w_desc, tiles, full, unit, slot, N, k_blocks, FOLD: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Start the copies of a unit of W: FOLD stacked column runs of the rows of GROUPS warpgroups.

    A box is the rows of a tile, or gated half of those of a group: of its gates, then of its ups.
    """
    tile = unit // k_blocks
    if GATED:
        ROWS: gl.constexpr = w_desc.block_type.shape[0]
        COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
        mbarrier.expect(full.index(slot), 2 * GROUPS * FOLD * w_desc.block_type.nbytes)
        column = unit % k_blocks * (FOLD * COLUMNS)
        for j in gl.static_range(FOLD * GROUPS):  # one of the two is 1
            first = (tile * GROUPS + j // FOLD) * ROWS
            for up in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    w_desc, [first + up * (N // 2), column + j % FOLD * COLUMNS], full.index(slot),
                    tiles.index(slot).slice((2 * j + up) * ROWS, ROWS, 0),
                )  # fmt: skip
    else:
        first = tile * w_desc.block_type.shape[0]
        copy(w_desc, tiles, full, first, unit, slot, k_blocks, FOLD)


@gluon.jit
def load_weights(
    w_desc, weights, w_full, empty, N, k_blocks, split_units, ahead, FOLD: gl.constexpr,
    GATED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights, which the preceding kernel does not write."""
    STAGES: gl.constexpr = weights.shape[0]
    begin, count = share(N, k_blocks, split_units, weights.shape[1] // FOLD)
    if DEPENDENT:
        gdc_launch_dependents()
    for i in range(count):
        wait_for_room(w_full, empty, i, ahead, STAGES)
        copy_rows(w_desc, weights, w_full, begin + i, i % STAGES, N, k_blocks, FOLD, 1, GATED)


@gluon.jit
def load_x(
    x_desc, rows, x_full, empty, N, k_blocks, split_units, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FOLD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads x, which the preceding kernel writes.  STAGES: of W's ring."""
    X_STAGES: gl.constexpr = rows.shape[0]
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    if DEPENDENT:
        gdc_wait()
    for i in range(count):
        if i >= X_STAGES:  # a unit of both is released by the barrier of W's
            before = i - X_STAGES
            mbarrier.wait(empty.index(before % STAGES), (before // STAGES) & 1)
        copy(x_desc, rows, x_full, 0, begin + i, i % X_STAGES, k_blocks, FOLD)


@gluon.jit
def unfold(acc, FOLD: gl.constexpr):
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
def add_runs(acc, FOLD: gl.constexpr):
    """Sum over column runs whose products are FOLD runs of rows, each with its own run of x."""
    if FOLD > 1:
        acc = gl.sum(acc.reshape([FOLD, acc.shape[0] // FOLD, acc.shape[1]]), 0)
    return acc


@gluon.jit
def _write(
    acc, OUT, BIAS, tile, M, N, factors, residual_sum, GATE: gl.constexpr, WORLD: gl.constexpr
):
    """y of a tile of acc's rows.  factors, residual_sum, WORLD: as of write_part."""
    HEIGHT: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = HEIGHT if GATE == "" else HEIGHT // 2
    n = tile_row(
        tile, gl.arange(0, HEIGHT, gl.SliceLayout(1, acc.type.layout)), N, HEIGHT, GATE != ""
    )
    if factors is not None:
        acc *= factors[None, :]
    if BIAS is not None:
        acc += gl.load(BIAS + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if GATE != "":
        y, outputs = gate_mul(acc, GATE).to(OUT.dtype.element_ty), N // 2
    else:
        y, outputs = acc.to(OUT.dtype.element_ty), N
        if residual_sum is not None:
            y = gl.convert_layout(y, output_layout(HEIGHT, BLOCK_M))
    n = tile * rows + gl.arange(0, rows, gl.SliceLayout(1, y.type.layout))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, y.type.layout))
    at, inside = m[None, :] * outputs + n[:, None], (n < outputs)[:, None] & (m < M)[None, :]
    if residual_sum is not None:
        residual, weight, plus_one, WEIGHTED, SQUARES, adds, rank_sum = residual_sum
        OUTGOING, INCOMING, LIMIT, sender_stride, rank = rank_sum
        if WORLD > 1:
            y = send_tile(y, at, inside, OUTGOING, WORLD)
        if adds != 0:
            total = y.to(gl.float32)
            if WORLD > 1:
                total = receive_tile(y, at, inside, INCOMING, LIMIT, sender_stride, rank, WORLD)
            y = add_residual(
                total, at, inside, residual, weight, plus_one, WEIGHTED, SQUARES, tile, m, M
            )
    gl.store(OUT + at, y, mask=inside)


@gluon.jit
def write_part(
    acc, whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units, factors,
    residual_sum, GROUPS: gl.constexpr, group: gl.constexpr, GATE: gl.constexpr,
    WORLD: gl.constexpr = 1,
):  # fmt: skip
    """Store y of a whole tile, or a partial sum; the last to arrive stores y of a split tile.

    acc      the sums of a tile, or those of one of GROUPS warpgroups, which have equal runs of its
             rows
    factors  of x's rows [BLOCK_M], or None
    residual_sum  (residual, weight, plus_one, WEIGHTED, SQUARES, adds, rank_sum) as of
             add_residual: y is added to the residual unless `adds` is 0; or None.
             rank_sum: (OUTGOING, INCOMING, LIMIT, sender_stride, rank) of WORLD ranks, as in
             rank_sum.py
    GATE     as of gate_mul: y [M, N / 2]; "": y [M, N]
    """
    HEIGHT: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = GROUPS * HEIGHT
    BLOCK_M: gl.constexpr = acc.shape[1]
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout))
    own = tile * GROUPS + group  # the tile of these rows
    if whole:
        _write(acc, OUT, BIAS, own, M, N, factors, residual_sum, GATE, WORLD)
    else:
        r = group * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, acc.type.layout))
        within = PARTS + r[:, None] * BLOCK_M + m[None, :]
        # Rows past N, too: a slot has room for a whole tile.
        real = (m[None, :] + 0 * r[:, None]) < M
        gl.store(within + slot.to(gl.int64) * (BLOCK_N * BLOCK_M), acc, mask=real)
        chunks, programs = gl.cdiv(N, BLOCK_N) * k_blocks // split_units, gl.num_programs(0)
        # The programs that have the tile's first and last units.
        first = ((tile * (k_blocks // split_units) + 1) * programs - 1) // chunks
        last = ((tile + 1) * (k_blocks // split_units) * programs - 1) // chunks
        cta_barrier()
        arrived = gl.atomic_add(ARRIVED + own, 1)
        if arrived == last - first:
            TOGETHER: gl.constexpr = max(1, AT_ONCE * 128 // (HEIGHT * BLOCK_M))
            total = gl.zeros_like(acc)
            for j in range(gl.cdiv(last - first + 1, TOGETHER)):
                for i in gl.static_range(TOGETHER):
                    program = first + j * TOGETHER + i
                    # Slots as in the kernels: only the first program begins at the tile's start.
                    place = 2 * program + (program == first).to(gl.int32)
                    total += gl.load(
                        within + place.to(gl.int64) * (BLOCK_N * BLOCK_M),
                        mask=real & (program <= last), other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
            _write(total, OUT, BIAS, own, M, N, factors, residual_sum, GATE, WORLD)
            gl.store(ARRIVED + own, 0)  # for the next GEMM
