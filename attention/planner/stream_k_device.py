"""The stream-K plan made on the GPU; the integers equal those of stream_k.py.

plan_stream_k
  grid      (1 + ceil(B / ROWS_EACH), INTERLEAVED).  Program 0 of the first axis writes starts,
            merges and the work tiles that begin at a cut; the others those that begin a row, for
            ROWS_EACH rows each.  The second axis repeats the plan for interleaved heads: HEADS and
            PROGRAMS are those of one plan; the plans are concatenated in work and starts
  reads     cu_seqlens_q [B + 1], cache_seqlens [B] int32
  writes    work, starts, merges of a SplitPlan; queue = 0
  math      Every program computes the prefix sum of the rows' costs, and for each boundary between
            shares (at most programs + 1) whether it cuts a row.
            A share has at least a block, so that no two boundaries cut at the same one: the work
            tile that begins at a boundary ends at the next or at the end of its unit (a row and KV
            head), and depends on no other.
  limits    kv_len * HEADS < 2^28 * block; the sum of all rows' costs < 2^44
  bound     latency: two memory round trips, some fifteen barriers; divisions are in 32 bits
            where possible
  checked   tests/attention/planner/test_device_planner.py: equal to plan_stream_k in numpy
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.planner.rows_device import (
    block_range,
    pair_of,
    read_queries,
    read_rows,
    write_work_tiles,
)


@triton.jit
def _unpack(sums):
    """A packed prefix sum -> planned rows (from bit 44 up), their costs (below)."""
    return (sums >> 44).to(tl.int32), sums & 0xFFFFFFFFFFF


@triton.jit
def _divide(a, b):
    """a // b of int32 that are not negative; unsigned division takes half the time."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _divide_wide(a, b, per):
    """a // b and a % b of an int64 below 2^44 by an int32; per = 1 / b in float32.

    A 64-bit division is a call of hundreds of cycles.  The first estimate leaves a remainder below
    2^23, the second is off by at most one.
    """
    rough = (a.to(tl.float32) * per).to(tl.int64)
    rest = (a - rough * b).to(tl.int32)
    fine = tl.floor(rest.to(tl.float32) * per).to(tl.int32)
    rest -= fine * b
    fine += (rest >= b).to(tl.int32) - (rest < 0).to(tl.int32)
    share = rough + fine
    return share, (a - share * b).to(tl.int32)


@triton.jit
def _first_boundary(position, total, used, ratio):
    """The smallest j with j * total // used >= position, that is j * total >= position * used.

    The float32 estimate is off by less than 1/2 + 2^-8, which the exact comparison corrects.
    """
    j = (position.to(tl.float32) * ratio + 0.5).to(tl.int32)
    return j + (j.to(tl.int64) * total < position * used).to(tl.int32)


@triton.jit
def _boundary(j, share, rest, used):
    """j * total // used, j >= 0, with total = share * used + rest: 32-bit except for the sum."""
    return j.to(tl.int64) * share + _divide(j * rest, used)


@triton.jit
def _block_at(inside, WORK_TILE_COST: tl.constexpr):
    """An offset into a unit in eighths -> the nearest block; 0 inside the fixed cost."""
    return (tl.maximum(inside - (WORK_TILE_COST - 4), 0) >> 3).to(tl.int32)


@triton.jit
def _four_offsets(x, step):
    """x, x + step, x + 2 * step, x + 3 * step along two more dimensions of 2."""
    return tl.join(tl.join(x, x + step), tl.join(x + 2 * step, x + 3 * step))


@triton.jit
def _gather_at(values, at):
    return tl.reshape(tl.gather(values, tl.reshape(at, [at.numel]), 0), at.shape)


@triton.jit
def _add_pairs(x):
    a, b = tl.split(x)
    return a + b


@triton.jit
def _last_up_to(values, j, SIZE: tl.constexpr):
    """For each j the last index whose value is at most j; values never decrease, values[0] <= 0.

    A 16-ary search, since an exchange between threads costs more than comparisons.  The sixteen
    candidates, at the end two to eight, are dimensions of 2, which stay within a thread.
    """
    found = tl.zeros_like(j)
    left: tl.constexpr = SIZE.bit_length() - 1
    for k in tl.static_range(left // 4):
        step = 1 << (left - 4 * k - 4)
        value = _gather_at(values, _four_offsets(_four_offsets(found, 4 * step), step))
        few = (value <= _four_offsets(_four_offsets(j, 0), 0)).to(tl.int32)
        found += step * (_add_pairs(_add_pairs(_add_pairs(_add_pairs(few)))) - 1)
    if left % 4 >= 2:
        step = 1 << (left % 4 - 2)
        few = (_gather_at(values, _four_offsets(found, step)) <= _four_offsets(j, 0)).to(tl.int32)
        found += step * (_add_pairs(_add_pairs(few)) - 1)
    if left % 2 == 1:
        found += (tl.gather(values, found + 1, 0) <= j).to(tl.int32)
    return found


@triton.jit
def _row_offsets(
    planned, blocks, HEADS: tl.constexpr, WORK_TILE_COST: tl.constexpr, MAX_ROWS: tl.constexpr
):
    """-> (packed exclusive prefix sum for `_unpack`, planned rows, their total cost or 1)."""
    cost = tl.maximum(blocks * 8 + WORK_TILE_COST, 1).to(tl.int64) * HEADS
    cost = tl.where(planned, cost + (1 << 44), 0)
    up_to = tl.cumsum(cost, 0)
    before = up_to - cost
    last = tl.gather(up_to, tl.full([1], MAX_ROWS - 1, tl.int32), 0)
    rows, total = _unpack(tl.sum(last, 0))
    total = tl.maximum(total, 1)
    return before, rows, total


@triton.jit
def _cuts(
    CU_SEQLENS_Q, CACHE_SEQLENS, j, before, total, used, share, rest, ratio, num_rows,
    HEADS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, WORK_TILE_COST: tl.constexpr,
    MAX_ROWS: tl.constexpr,
):  # fmt: skip
    """The row of each boundary j, and whether the boundary cuts it.

    -> (row, its rank among planned rows, head, block, q_start, q_len, kv_len, first_block, blocks,
    offset of the unit, whether it is cut, whether this is the unit's first cut)
    """
    _, row_at = _unpack(before)
    row = _last_up_to(_first_boundary(row_at, total, used, ratio), j, MAX_ROWS)
    rank, row_at = _unpack(tl.gather(before, row, 0))
    real = (j < used) & (row < num_rows)
    kv_len = tl.load(CACHE_SEQLENS + row, mask=real, other=0)
    q_start, q_len = read_queries(CU_SEQLENS_Q, row, real)
    first_block, blocks = block_range(q_len, kv_len, WINDOW, BLOCK)
    position = _boundary(j, share, rest, used)
    inside = (position - row_at).to(tl.int32)
    row_cost = tl.maximum(blocks * 8 + WORK_TILE_COST, 1)
    head = tl.zeros_like(j)
    if HEADS > 1:
        head = _divide(inside, row_cost)
        inside -= head * row_cost
    block = _block_at(inside, WORK_TILE_COST)
    cut = (block > 0) & (block < blocks)
    unit_at = position - inside
    position_before = _boundary(tl.maximum(j - 1, 0), share, rest, used)
    first_cut = cut & (_block_at(position_before - unit_at, WORK_TILE_COST) == 0)
    return (
        row, rank, head, block, q_start, q_len, kv_len, first_block, blocks, unit_at, cut, first_cut
    )  # fmt: skip


@triton.jit
def _first_cut_after(
    unit_at, counts_before, total, used, share, rest, ratio, WORK_TILE_COST: tl.constexpr
):
    """-> (block where a unit's first work tile ends, unless the unit does, cuts before it)."""
    # The first boundary that may cut the unit.
    cutter = tl.minimum(_first_boundary(unit_at + (WORK_TILE_COST + 4), total, used, ratio), used)
    end = _block_at(_boundary(cutter, share, rest, used) - unit_at, WORK_TILE_COST)
    return end, tl.gather(counts_before & 0xFFFF, cutter, 0)


@triton.jit
def _write_merges(
    MERGES, j, start, unit_at, blocks, first_cut, counts, marks, total, used, ratio, copy,
    INTERLEAVED: tl.constexpr, PROGRAMS: tl.constexpr, WORK_TILE_COST: tl.constexpr,
):  # fmt: skip
    """Write `merges`; all boundaries from a unit's first cut to the last inside it are cuts.

    Cut units fill `merges` from the front; boundaries that are no first cut write zeros from the
    back.  The entries of interleaved plans alternate, so that zeros come last.
    """
    past = _first_boundary(unit_at + blocks * 8 + (WORK_TILE_COST - 4), total, used, ratio)
    merged = (counts - marks) >> 16
    slot = tl.where(first_cut, merged, PROGRAMS - 1 - (j - merged))
    pair = tl.where(first_cut, pair_of(start - 1, 1 + past - j), 0)
    entry = MERGES.to(tl.pointer_type(tl.int64)) + slot * INTERLEAVED + copy
    tl.store(entry, pair, mask=j < PROGRAMS)


@triton.jit
def _write_split_work_tiles(
    WORK, STARTS, MERGES, j, rows, row, rank, head, block, q_start, q_len, kv_len, first_block,
    blocks, unit_at, cut, first_cut, counts, marks, total, used, share, rest, ratio, copy, copy_at,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    WORK_TILE_COST: tl.constexpr,
):  # fmt: skip
    """Write the start of each share, the work tiles that begin at a cut, and the merges."""
    unit = rank * HEADS + head + ((blocks > 0) & (block >= blocks)).to(tl.int32)
    start = tl.where(j < used, unit, rows * HEADS) + (counts & 0xFFFF)
    start = copy_at + tl.where(j == 0, 0, start)  # 0 also for a batch without rows
    # The end of a plan is the start of the next: both write that entry with the same value.
    tl.store(STARTS + copy * PROGRAMS + j, start, mask=j <= PROGRAMS)
    end = _block_at(_boundary(j + 1, share, rest, used) - unit_at, WORK_TILE_COST)
    write_work_tiles(
        WORK, start, row, head * INTERLEAVED + copy, block, tl.minimum(end, blocks), q_start, q_len,
        kv_len, first_block, blocks, cut, BLOCK,
    )  # fmt: skip
    _write_merges(
        MERGES, j, start, unit_at, blocks, first_cut, counts, marks, total, used, ratio, copy,
        INTERLEAVED, PROGRAMS, WORK_TILE_COST,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "CACHE_SEQLENS"],
)
def plan_stream_k(
    CU_SEQLENS_Q, CACHE_SEQLENS, WORK, STARTS, MERGES, QUEUE, num_rows,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, MAX_Q_LEN: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, WORK_TILE_COST: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    MAX_ROWS: tl.constexpr, BOUNDARIES: tl.constexpr, ROWS_EACH: tl.constexpr,
    ROW_UNITS: tl.constexpr,
):  # fmt: skip
    # The units whose first work tiles this program writes, loaded first: one memory round trip.
    n = tl.arange(0, ROWS_EACH * ROW_UNITS)
    my_row = (tl.program_id(0) - 1) * ROWS_EACH + n // ROW_UNITS
    my_head = n % ROW_UNITS
    mine = (my_row >= 0) & (my_row < num_rows) & (my_head < HEADS)
    my_planned, my_q_start, my_q_len, my_kv_len, my_first_block, my_blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, my_row, mine, MAX_Q_LEN, WINDOW, BLOCK
    )
    # Contiguity 1: with 2 or 4 elements per thread, each gather and store would need another
    # exchange between threads.
    all_rows = tl.max_contiguous(tl.arange(0, MAX_ROWS), 1)
    planned, _, _, _, _, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, all_rows, all_rows < num_rows, MAX_Q_LEN, WINDOW, BLOCK
    )
    before, rows, total = _row_offsets(planned, blocks, HEADS, WORK_TILE_COST, MAX_ROWS)
    used = tl.maximum(tl.minimum(total, PROGRAMS * MIN_SHARE).to(tl.int32) // MIN_SHARE, 1)
    share, rest = _divide_wide(total, used, 1.0 / used.to(tl.float32))
    ratio = used.to(tl.float32) / total.to(tl.float32)

    j = tl.max_contiguous(tl.arange(0, BOUNDARIES), 1)
    (
        row, rank, head, block, q_start, q_len, kv_len, first_block, blocks, unit_at, cut, first_cut
    ) = _cuts(
        CU_SEQLENS_Q, CACHE_SEQLENS, j, before, total, used, share, rest, ratio, num_rows,
        HEADS, WINDOW, BLOCK, WORK_TILE_COST, MAX_ROWS,
    )  # fmt: skip
    # One prefix sum for two counts: cuts, and from bit 16 up the units with a cut.
    marks = cut.to(tl.int32) + (first_cut.to(tl.int32) << 16)
    counts = tl.cumsum(marks, 0)
    copy = tl.program_id(1)
    copy_at = 0  # offset in work, after the work tiles of the plans before
    if INTERLEAVED > 1:
        cuts = tl.gather(counts & 0xFFFF, tl.full([1], BOUNDARIES - 1, tl.int32), 0)
        copy_at = copy * (rows * HEADS + tl.sum(cuts, 0))

    if tl.program_id(0) > 0:
        my_rank, my_at = _unpack(tl.gather(before, tl.minimum(my_row, MAX_ROWS - 1), 0))
        my_at += my_head * tl.maximum(my_blocks * 8 + WORK_TILE_COST, 1)
        my_end, cuts_before = _first_cut_after(
            my_at, counts - marks, total, used, share, rest, ratio, WORK_TILE_COST
        )
        write_work_tiles(
            WORK, copy_at + my_rank * HEADS + my_head + cuts_before, my_row,
            my_head * INTERLEAVED + copy, tl.zeros_like(my_row), tl.minimum(my_end, my_blocks),
            my_q_start, my_q_len, my_kv_len, my_first_block, my_blocks, mine & my_planned, BLOCK,
        )  # fmt: skip
    else:
        tl.store(QUEUE, 0)
        _write_split_work_tiles(
            WORK, STARTS, MERGES, j, rows, row, rank, head, block, q_start, q_len, kv_len,
            first_block, blocks, unit_at, cut, first_cut, counts, marks, total, used, share, rest,
            ratio, copy, copy_at, INTERLEAVED, HEADS, PROGRAMS, BLOCK, WORK_TILE_COST,
        )  # fmt: skip
