"""The uneven plan on the GPU: uneven.py's integers, computed where the lengths are.

plan_uneven
  grid      1 + ceil(B / ROWS_EACH).  Program 0 writes starts, merges and the pieces that begin at
            a cut; the others those that begin a row, ROWS_EACH rows each
  reads     cu_seqlens_q [B + 1], cache_seqlens [B] int32
  writes    work, starts, merges of a SplitPlan; queue = 0
  math      Every program repeats what all need: the prefix sum of the rows' costs, and for each
            boundary between shares (at most programs + 1) whether it cuts a row.  The row of a
            boundary is found without a search: first_boundary() gives the boundaries before each
            row, so a histogram and its prefix sum give the rows before each boundary.
            A share is longer than the fixed cost of a piece, so each boundary's piece ends at the
            next boundary or at the end of its unit (a row and KV head), and is found alone.
  limits    kv_len * kv_heads < 2^28 * block; the sum of all rows' costs < 2^44
  bound     latency: two trips to memory, some twenty barriers
  checked   tests/attention/test_device_planner.py: equal to plan_uneven in numpy
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.planner.device_rows import pair_of, read_rows, write_pieces


@triton.jit
def _apart(sums):
    """A prefix sum that carries two counts: planned rows from bit 44 up, their costs below."""
    return (sums >> 44).to(tl.int32), sums & 0xFFFFFFFFFFF


@triton.jit
def _first_boundary(position, total, used, ratio):
    """The smallest j with j * total // used >= position, that is j * total >= position * used.

    The float32 estimate is off by less than 1/2 + 2^-8, which the exact comparison makes good.
    """
    j = (position.to(tl.float32) * ratio + 0.5).to(tl.int32)
    return j + (j.to(tl.int64) * total < position * used).to(tl.int32)


@triton.jit
def _boundary(j, share, rest, used):
    """j * total // used; total = share * used + rest, so that no product passes 2^31 * programs."""
    return j.to(tl.int64) * share + (j * rest) // used


@triton.jit
def _block_at(inside, PIECE_COST: tl.constexpr):
    """Eighths into a unit -> the nearest block; 0 inside the fixed cost."""
    return (tl.maximum(inside - (PIECE_COST - 4), 0) // 8).to(tl.int32)


@triton.jit
def _write_rows(
    CU_SEQLENS_Q, CACHE_SEQLENS, WORK, first_row, num_rows, before, cuts, total, used, ratio,
    share, rest, HEADS: tl.constexpr, MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PIECE_COST: tl.constexpr, ROWS_EACH: tl.constexpr,
    ROW_UNITS: tl.constexpr,
):  # fmt: skip
    """The pieces that begin a unit, of ROWS_EACH rows; cuts: how many before each boundary."""
    n = tl.arange(0, ROWS_EACH * ROW_UNITS)
    row = first_row + n // ROW_UNITS
    head = n % ROW_UNITS
    real = (row < num_rows) & (head < HEADS)
    rank, row_at = _apart(tl.gather(before, tl.minimum(row, before.shape[0] - 1), 0))
    planned, q_start, q_len, kv_len, first_block, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, row, real, MAX_Q_LEN, WINDOW, BLOCK
    )
    unit_at = row_at + head * tl.maximum(blocks * 8 + PIECE_COST, 1)
    # The first boundary that may cut the unit: those before it are not cuts of this unit.
    cutter = tl.minimum(_first_boundary(unit_at + (PIECE_COST + 4), total, used, ratio), used)
    end = _block_at(_boundary(cutter, share, rest, used) - unit_at, PIECE_COST)
    write_pieces(
        WORK, rank * HEADS + head + tl.gather(cuts, cutter, 0), row, head, tl.zeros_like(row),
        tl.minimum(end, blocks), q_start, q_len, kv_len, first_block, blocks, real & planned,
        BLOCK,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "CACHE_SEQLENS"],
)
def plan_uneven(
    CU_SEQLENS_Q, CACHE_SEQLENS, WORK, STARTS, MERGES, QUEUE, num_rows,
    HEADS: tl.constexpr, PROGRAMS: tl.constexpr, MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PIECE_COST: tl.constexpr, MIN_SHARE: tl.constexpr,
    MAX_ROWS: tl.constexpr, BOUNDARIES: tl.constexpr, ROWS_EACH: tl.constexpr,
    ROW_UNITS: tl.constexpr,
):  # fmt: skip
    # A thread takes elements one by one (contiguity 1): in pairs or fours, each gather and store
    # would go through another exchange between threads.
    all_rows = tl.max_contiguous(tl.arange(0, MAX_ROWS), 1)
    planned, _, _, _, _, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, all_rows, all_rows < num_rows, MAX_Q_LEN, WINDOW, BLOCK
    )
    cost = tl.maximum(blocks * 8 + PIECE_COST, 1).to(tl.int64) * HEADS
    cost = tl.where(planned, cost + (1 << 44), 0)
    before = tl.cumsum(cost, 0) - cost
    rows, total = _apart(tl.sum(cost, 0))
    total = tl.maximum(total, 1)
    used = tl.minimum(tl.maximum(total // MIN_SHARE, 1), PROGRAMS).to(tl.int32)
    share = total // used
    rest = (total - share * used).to(tl.int32)
    ratio = used.to(tl.float32) / total.to(tl.float32)

    # The row of each boundary, and whether the boundary cuts it.
    j = tl.max_contiguous(tl.arange(0, BOUNDARIES), 1)
    _, row_at = _apart(before)
    row_first = _first_boundary(row_at, total, used, ratio)
    row = tl.cumsum(tl.histogram(row_first, BOUNDARIES), 0) - 1
    rank, row_at = _apart(tl.gather(before, tl.minimum(row, MAX_ROWS - 1), 0))
    real = (j < used) & (row < num_rows)
    _, q_start, q_len, kv_len, first_block, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, row, real, MAX_Q_LEN, WINDOW, BLOCK
    )
    position = _boundary(j, share, rest, used)
    inside = (position - row_at).to(tl.int32)
    row_cost = tl.maximum(blocks * 8 + PIECE_COST, 1)
    head = inside // row_cost
    inside -= head * row_cost
    block = _block_at(inside, PIECE_COST)
    cut = (block > 0) & (block < blocks)
    unit_at = position - inside
    block_before = _block_at(_boundary(j - 1, share, rest, used) - unit_at, PIECE_COST)
    first_cut = cut & (block_before == 0)
    # One prefix sum for two counts: cuts, and from bit 16 up the units that are cut.
    marks = cut.to(tl.int32) + (first_cut.to(tl.int32) << 16)
    counts = tl.cumsum(marks, 0)

    if tl.program_id(0) > 0:
        first_row = (tl.program_id(0) - 1) * ROWS_EACH
        _write_rows(
            CU_SEQLENS_Q, CACHE_SEQLENS, WORK, first_row, num_rows, before,
            (counts - marks) & 0xFFFF, total, used, ratio, share, rest,
            HEADS, MAX_Q_LEN, WINDOW, BLOCK, PIECE_COST, ROWS_EACH, ROW_UNITS,
        )  # fmt: skip
    else:
        tl.store(QUEUE, 0)
        unit = rank * HEADS + head + ((blocks > 0) & (block >= blocks)).to(tl.int32)
        start = tl.where(j < used, unit, rows * HEADS) + (counts & 0xFFFF)
        start = tl.where(j == 0, 0, start)  # also of a batch without rows
        tl.store(STARTS + j, start, mask=j <= PROGRAMS)
        end = _block_at(_boundary(j + 1, share, rest, used) - unit_at, PIECE_COST)
        write_pieces(
            WORK, start, row, head, block, tl.minimum(end, blocks), q_start, q_len, kv_len,
            first_block, blocks, cut, BLOCK,
        )  # fmt: skip
        # All boundaries from a unit's first cut to the last inside are cuts.  Units that are cut
        # fill `merges` from the front, the boundaries that are no first cut zero the others.
        past = _first_boundary(unit_at + blocks * 8 + (PIECE_COST - 4), total, used, ratio)
        merged = (counts - marks) >> 16
        slot = tl.where(first_cut, merged, PROGRAMS - 1 - (j - merged))
        pair = tl.where(first_cut, pair_of(start - 1, 1 + past - j), 0)
        tl.store(MERGES.to(tl.pointer_type(tl.int64)) + slot, pair, mask=j < PROGRAMS)
