"""The queued plans made on the GPU; the integers equal those of queued_plans.py.

plan_counts
  grid      ceil(B / ROWS_EACH), at least 1; a program writes the work tiles and merges of its rows,
            program 0 also starts and the unused merges
  reads     cu_seqlens_q [B + 1], cache_seqlens [B] int32
  writes    work, starts, merges of a SplitPlan; queue = 0
  math      num_splits is clip(ceil(blocks / divisor), 1, cap), so that planning is finding these
            two numbers, which every program does.  No sort: a row's position is the sum of the
            splits of all rows ordered before it, by split length and then by index.
  limits    kv_len < 2^27 * block; rows * kv_heads + 2 * programs < 2^20
  bound     latency: FlashAttention-3's counts are one sum over the rows, the greedy planner's two
            bisections with a sum per step
  checked   tests/attention/planner/test_device_planner.py: equal to plan_fa3, plan_greedy in numpy
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.planner.rows_device import pair_of, read_rows, write_work_tiles


@triton.jit
def _ceil_div(a, b):
    return (a + (b - 1)) // b


@triton.jit
def _parts(blocks, length):
    """ceil(blocks / length) in int32, but at least 1; unsigned division takes half the time."""
    many = (blocks + (length - 1)).to(tl.uint32) // length.to(tl.uint32)
    return tl.maximum(many.to(tl.int32), 1)


@triton.jit
def _parts_of(blocks, planned, divisor, cap):
    """-> (blocks of a split, splits that are not empty); 0 splits of rows that are not planned."""
    part = _parts(blocks, tl.minimum(_parts(blocks, divisor), cap))
    part = tl.minimum(part, blocks)  # 0 for an empty row
    return part, tl.where(planned, _parts(blocks, tl.maximum(part, 1)), 0)


@triton.jit
def _fa3_share(total, HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The share of fa3_counts: four float32 roundings to nearest."""
    share = tl.div_rn(total.to(tl.float32) * 1.1 * HEADS, PROGRAMS * 1.0)
    return tl.maximum(tl.ceil(share).to(tl.int32), 1)


@triton.jit
def _pair_sum(a, b):
    """Sums over the rows of two int64 vectors in one exchange between threads."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def _bounds(units, total, longest, waves, PROGRAMS: tl.constexpr):
    """-> (maximum number of splits, lower and upper bound of largest_part).

    Splits of T blocks are at least total / T, and less than total / T + units.
    """
    most = tl.minimum(waves * PROGRAMS, units + 2 * PROGRAMS)
    low = tl.maximum(_ceil_div(total, tl.maximum(most, 1)), 1)
    spare = tl.minimum(most - units, PROGRAMS)
    high = tl.where(spare > 0, _ceil_div(total, tl.maximum(spare, 1)), longest)
    return most, tl.minimum(low, longest).to(tl.int32), tl.minimum(high, longest).to(tl.int32)


@triton.jit
def _parts_and_cuts(blocks, planned, length):
    """Number of splits of at most `length` blocks; bit 40: there are several."""
    several = (blocks > length).to(tl.int64) << 40
    return tl.where(planned, _parts(blocks, length).to(tl.int64) + several, 0)


@triton.jit
def _fits(sums, most, HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    parts = sums & 0xFFFFFFFFFF
    return (parts * HEADS <= most) & ((sums >> 40) * HEADS <= PROGRAMS)


@triton.jit
def _largest_parts(
    blocks, planned, units, total, longest, HEADS: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """largest_part for the fewest waves and for one more, by two bisections in lockstep."""
    waves = _ceil_div(units, PROGRAMS)
    most_a, low_a, high_a = _bounds(units, total, longest, waves, PROGRAMS)
    most_b, low_b, high_b = _bounds(units, total, longest, waves + 1, PROGRAMS)
    while (low_a < high_a) | (low_b < high_b):
        middle_a = (low_a + high_a) // 2
        middle_b = (low_b + high_b) // 2
        sum_a, sum_b = _pair_sum(
            _parts_and_cuts(blocks, planned, middle_a), _parts_and_cuts(blocks, planned, middle_b)
        )
        # A finished bisection has low == middle == high and stays so.
        fits_a = _fits(sum_a, most_a, HEADS, PROGRAMS) | (low_a == high_a)
        fits_b = _fits(sum_b, most_b, HEADS, PROGRAMS) | (low_b == high_b)
        high_a = tl.where(fits_a, middle_a, high_a)
        high_b = tl.where(fits_b, middle_b, high_b)
        low_a = tl.where(fits_a, low_a, middle_a + 1)
        low_b = tl.where(fits_b, low_b, middle_b + 1)
    return low_a, low_b


@triton.jit
def _price(
    blocks, planned, total, divisor, cap, HEADS: tl.constexpr, PROGRAMS: tl.constexpr,
    WORK_TILE_COST: tl.constexpr, MERGE_COST: tl.constexpr, MERGE_TILE_COST: tl.constexpr,
):  # fmt: skip
    """queued_plans.price of num_splits given by divisor and cap."""
    part, parts = _parts_of(blocks, planned, divisor, cap)
    longest = tl.max(tl.where(planned, part, 0), 0)
    length = _ceil_div(longest * (tl.arange(0, 8) + 1), 8)
    long_parts = tl.sum(tl.where(part[:, None] >= length[None, :], parts[:, None], 0), 0)
    waves = _ceil_div(long_parts * HEADS, PROGRAMS).to(tl.int64)
    in_waves = tl.max(waves * (WORK_TILE_COST + 8 * length), 0)
    work_tiles, partials = _pair_sum(parts, tl.where(parts > 1, parts, 0))
    mean = _ceil_div(total * 8 + work_tiles.to(tl.int64) * HEADS * WORK_TILE_COST, PROGRAMS)
    merge = MERGE_COST + partials * HEADS * MERGE_TILE_COST // PROGRAMS
    return tl.maximum(mean, in_waves) + tl.where(partials > 0, merge, 0)


@triton.jit
def _marks_before(
    CU_SEQLENS_Q, CACHE_SEQLENS, num_rows, row, part, divisor, cap,
    MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Splits of all rows ordered before each of `row`; from bit 20 up, how many rows are split."""
    before = tl.zeros_like(row)
    for begin in range(0, num_rows, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        planned, _, _, _, _, blocks = read_rows(
            CU_SEQLENS_Q, CACHE_SEQLENS, other, other < num_rows, MAX_Q_LEN, WINDOW, BLOCK
        )
        other_part, parts = _parts_of(blocks, planned, divisor, cap)
        marks = parts + ((parts > 1).to(tl.int32) << 20)
        earlier = (other[None, :] < row[:, None]).to(tl.int32)
        sooner = other_part[None, :] + earlier > part[:, None]
        before += tl.sum(tl.where(sooner, marks[None, :], 0), 1)
    return before


@triton.jit
def _write_rows(
    CU_SEQLENS_Q, CACHE_SEQLENS, WORK, MERGES, num_rows, divisor, cap,
    HEADS: tl.constexpr, MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, ROWS_EACH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the work tiles and merges of a program's rows."""
    row = tl.program_id(0) * ROWS_EACH + tl.arange(0, ROWS_EACH)
    planned, q_start, q_len, kv_len, first_block, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, row, row < num_rows, MAX_Q_LEN, WINDOW, BLOCK
    )
    part, parts = _parts_of(blocks, planned, divisor, cap)
    before = _marks_before(
        CU_SEQLENS_Q, CACHE_SEQLENS, num_rows, row, part, divisor, cap,
        MAX_Q_LEN, WINDOW, BLOCK, CHUNK,
    )[:, None]  # fmt: skip
    work_tiles = (parts * HEADS)[:, None]
    count = tl.maximum(parts, 1)[:, None]
    part, blocks = part[:, None], blocks[:, None]
    for begin in range(0, tl.max(parts, 0) * HEADS, LANES):
        work_tile = begin + tl.arange(0, LANES)[None, :]
        head = (work_tile.to(tl.uint32) // count.to(tl.uint32)).to(tl.int32)
        k = work_tile - head * count
        index = (before & 0xFFFFF) * HEADS + work_tile
        real = work_tile < work_tiles
        write_work_tiles(
            WORK, index, row[:, None], head, k * part, tl.minimum((k + 1) * part, blocks),
            q_start[:, None], q_len[:, None], kv_len[:, None], first_block[:, None], blocks,
            real, BLOCK,
        )  # fmt: skip
        merge = MERGES.to(tl.pointer_type(tl.int64)) + (before >> 20) * HEADS + head
        tl.store(merge, pair_of(index, count), mask=real & (k == 0) & (count > 1))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "CACHE_SEQLENS"],
)
def plan_counts(
    CU_SEQLENS_Q, CACHE_SEQLENS, WORK, STARTS, MERGES, QUEUE, num_rows,
    HEADS: tl.constexpr, PROGRAMS: tl.constexpr, MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, WORK_TILE_COST: tl.constexpr, MERGE_COST: tl.constexpr,
    MERGE_TILE_COST: tl.constexpr, CAP: tl.constexpr, MAX_SPLIT_ROWS: tl.constexpr,
    GREEDY: tl.constexpr, MAX_ROWS: tl.constexpr, BOUNDARIES: tl.constexpr,
    CHUNK: tl.constexpr, ROWS_EACH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    all_rows = tl.arange(0, MAX_ROWS)
    planned, _, _, _, _, blocks = read_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, all_rows, all_rows < num_rows, MAX_Q_LEN, WINDOW, BLOCK
    )
    rows, total = _pair_sum(planned.to(tl.int64), blocks.to(tl.int64))
    divisor = _fa3_share(total, HEADS, PROGRAMS)
    cap = tl.where(rows > MAX_SPLIT_ROWS, 1, CAP)
    if GREEDY:
        total = total * HEADS
        longest = tl.maximum(tl.max(blocks, 0), 1)
        one, two = _largest_parts(
            blocks, planned, rows.to(tl.int32) * HEADS, total, longest, HEADS, PROGRAMS
        )
        best = _price(
            blocks, planned, total, divisor, cap, HEADS, PROGRAMS, WORK_TILE_COST, MERGE_COST,
            MERGE_TILE_COST,
        )  # fmt: skip
        uncapped = 1 << 30
        price_one = _price(
            blocks, planned, total, one, uncapped, HEADS, PROGRAMS, WORK_TILE_COST, MERGE_COST,
            MERGE_TILE_COST,
        )  # fmt: skip
        price_two = _price(
            blocks, planned, total, two, uncapped, HEADS, PROGRAMS, WORK_TILE_COST, MERGE_COST,
            MERGE_TILE_COST,
        )  # fmt: skip
        divisor = tl.where(price_one < best, one, divisor)
        cap = tl.where(price_one < best, uncapped, cap)
        best = tl.minimum(best, price_one)
        divisor = tl.where(price_two < best, two, divisor)
        cap = tl.where(price_two < best, uncapped, cap)
    _write_rows(
        CU_SEQLENS_Q, CACHE_SEQLENS, WORK, MERGES, num_rows, divisor, cap,
        HEADS, MAX_Q_LEN, WINDOW, BLOCK, CHUNK, ROWS_EACH, LANES,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        _, parts = _parts_of(blocks, planned, divisor, cap)
        work_tiles, cut = _pair_sum(parts, (parts > 1).to(tl.int32))
        j = tl.arange(0, BOUNDARIES)
        tl.store(STARTS + j, work_tiles * HEADS + tl.zeros_like(j), mask=j <= PROGRAMS)
        unused = (j >= cut * HEADS) & (j < PROGRAMS)
        zero = tl.zeros_like(j).to(tl.int64)
        tl.store(MERGES.to(tl.pointer_type(tl.int64)) + j, zero, mask=unused)
        tl.store(QUEUE, 0)
