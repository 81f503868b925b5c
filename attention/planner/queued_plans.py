"""The queued split planners `fa3` and `greedy`: every row in equal splits, longest first.

Programs take the next work tile from a queue as they become free, so that the order matters and no
tile is assigned to a program.

fa3     FlashAttention-3's dynamic split heuristic, the baseline: each row is split by the mean load
        of a program with a margin of 1.1, which often gives a few splits more than programs.  They
        make a second wave, nearly empty and as long as the first
greedy  solves the inverse: given the splits of n full waves, how short can the longest split be?

The published greedy strategy removes splits from FlashAttention-3's counts, one at a time and
always where the remaining splits stay shortest, until one wave holds them.  The result is the
smallest T such that splits of at most T blocks fit one wave; bisection finds T without a loop over
rows.  For one more wave the search is the same.  Three candidates are priced: FlashAttention-3's
counts, the fewest waves, and one wave more.  More waves gained nothing in simulation.  The cheapest
is taken, FlashAttention-3's on a tie, so that at this price no plan is worse than the baseline.

Sources: flash-attention, hopper/flash_prepare_scheduler.cu and heuristics.h; "Beating Wave
Quantization: Sequence Split Optimization for FlashAttention", 2025.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attention.planner.split_plan import (
    EIGHTHS,
    HostSplitPlan,
    Int32Array,
    PlannedRows,
    SplitPlanSpec,
    planned_rows,
    work_tiles_of,
)

MARGIN = np.float32(1.1)  # on the mean, because splits are whole blocks
MAX_SPLITS = 128  # FlashAttention-3's limit per row
MAX_SPLIT_ROWS = 992  # larger batches are not split: one thread block plans them
THRESHOLDS = 8  # lengths at which the price counts splits, evenly from the longest down


def plan_fa3(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """The plan of FlashAttention-3 for spec.programs programs."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    cap = split_cap(spec.kv_heads, spec.programs)
    return plan_of_counts(rows, fa3_counts(rows.blocks, spec, cap), spec)


def fa3_counts(blocks: Int32Array, spec: SplitPlanSpec, cap: int) -> Int32Array:
    """blocks [R] -> num_splits [R], each between 1 and cap.

    share = ceil(float32(sum of blocks) * 1.1f * float32(kv_heads) / float32(programs)), at least 1:
    four float32 roundings to nearest, from left to right, the division included.  Count =
    clip(ceil(blocks / share), 1, cap) in integers; with more than 992 rows all counts are 1.

    Fits a SplitPlan: share >= 1.1 * total * kv_heads / programs * (1 - 2^-21), and a row with more
    than one split has more than `share` blocks, so that fewer than programs (row, head) are split;
    ceil(blocks / share) sums to less than rows + programs / kv_heads.
    """
    if len(blocks) > MAX_SPLIT_ROWS:
        return np.ones_like(blocks)
    total = np.float32(blocks.sum(dtype=np.int64))
    share = total * MARGIN * np.float32(spec.kv_heads) / np.float32(spec.programs)
    share = max(int(np.ceil(share)), 1)
    return np.clip(-(-blocks // share), 1, cap).astype(np.int32)


@lru_cache
def split_cap(kv_heads: int, programs: int, max_blocks: int = MAX_SPLITS) -> int:
    """The largest num_splits of FlashAttention-3; max_blocks: of the longest row.

    Its `num_splits_heuristic` for one row: the smallest count whose wave efficiency is at least
    85 % of the best.  FlashAttention-3 gets the page table's capacity as the longest row, so that
    max_blocks rarely matters; it is a parameter because nothing is split up to 4 blocks.
    """
    if kv_heads >= np.float32(0.8) * programs or max_blocks <= 4:
        return 1
    counts = np.arange(1, min(MAX_SPLITS, programs, max_blocks) + 1)
    waves = (kv_heads * counts).astype(np.float32) / np.float32(programs)
    filled = waves / np.ceil(waves)
    return int(counts[filled >= np.float32(0.85) * filled.max()][0])


def plan_greedy(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """The cheapest of three plans for spec.programs programs."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    cap = split_cap(spec.kv_heads, spec.programs)
    return plan_of_counts(rows, greedy_counts(rows.blocks, spec, cap), spec)


def greedy_counts(blocks: Int32Array, spec: SplitPlanSpec, cap: int) -> Int32Array:
    """blocks [R] -> num_splits [R]; in integers only, so that the device finds the same."""
    fewest_waves = -(-len(blocks) * spec.kv_heads // spec.programs)
    candidates = [fa3_counts(blocks, spec, cap)]
    for waves in (fewest_waves, fewest_waves + 1):
        largest = largest_part(blocks, spec, waves)
        candidates.append(np.maximum(-(-blocks // largest), 1).astype(np.int32))
    prices = [price(blocks, counts, spec) for counts in candidates]
    return candidates[prices.index(min(prices))]


def largest_part(blocks: Int32Array, spec: SplitPlanSpec, waves: int) -> int:
    """The smallest T >= 1 such that ceil(blocks / T) splits per row fit `waves` waves of programs.

    They must also fit a SplitPlan: at most 2 * programs splits more than (row, head) pairs, and at
    most `programs` pairs that are split.  Where nothing fits, the longest row: no row is split.
    """
    heads, programs = spec.kv_heads, spec.programs
    most = min(waves * programs, len(blocks) * heads + 2 * programs)
    low, high = 1, max(int(blocks.max(initial=0)), 1)
    while low < high:
        middle = (low + high) // 2
        parts = int(np.maximum(-(-blocks // middle), 1).sum(dtype=np.int64)) * heads
        cut = int((blocks > middle).sum()) * heads
        if parts <= most and cut <= programs:
            high = middle
        else:
            low = middle + 1
    return low


def price(blocks: Int32Array, counts: Int32Array, spec: SplitPlanSpec) -> int:
    """A lower bound of a queued plan's makespan, combine included, in eighths of a block.

    The maximum of the mean load and, for 8 lengths x = ceil(longest * j / 8), of the waves of all
    splits of at least x blocks, each x long.  Exact for splits of one length, if the rows' last
    splits are counted as full.
    """
    heads, programs, tile_cost = spec.kv_heads, spec.programs, spec.work_tile_cost
    part, parts = part_of(blocks, counts)
    work_tiles = int(parts.sum(dtype=np.int64)) * heads
    total = int(blocks.sum(dtype=np.int64)) * heads * EIGHTHS
    cost = -(-(total + tile_cost * work_tiles) // programs)
    longest = int(part.max(initial=0))
    for j in range(1, THRESHOLDS + 1):
        length = -(-longest * j // THRESHOLDS)
        long_parts = int(parts[part >= length].sum(dtype=np.int64)) * heads
        cost = max(cost, -(-long_parts // programs) * (tile_cost + EIGHTHS * length))
    partials = int(parts[parts > 1].sum(dtype=np.int64)) * heads
    if partials:
        cost += spec.merge_cost + spec.merge_tile_cost * partials // programs
    return cost


def part_of(blocks: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """num_splits -> (blocks of a split, splits that are not empty).

    A split has ceil(blocks / count) blocks and the last one the rest, so that fewer splits than
    requested may suffice: 5 blocks in 4 splits are 2, 2 and 1.  A row without blocks has one split.
    """
    part = -(-blocks // counts)
    return part, np.maximum(-(-blocks // np.maximum(part, 1)), 1)


def plan_of_counts(rows: PlannedRows, counts: Int32Array, spec: SplitPlanSpec) -> HostSplitPlan:
    """Split row i of `rows` into counts[i] >= 1 work tiles for each KV head.

    Order of `work`: rows by the length of their splits, longest first and stable; in a row by head,
    then along the KV.  `merges` has an entry for each split row and head in the same order.  The
    caller keeps to spec.capacity work tiles and spec.programs merges.
    """
    heads = spec.kv_heads
    part, parts = part_of(rows.blocks, counts)
    order = np.argsort(-part, kind="stable")
    unit_row = np.repeat(order, heads)  # a unit is a row and a KV head
    unit_parts = parts[unit_row]
    unit_first = np.cumsum(unit_parts) - unit_parts
    unit = np.repeat(np.arange(len(unit_row)), unit_parts)
    index = unit_row[unit]
    first = (np.arange(len(unit)) - unit_first[unit]) * part[index]
    end = np.minimum(first + part[index], rows.blocks[index])
    work = work_tiles_of(rows, index, unit % heads, first, end, spec)

    cut = np.flatnonzero(unit_parts > 1)
    assert len(cut) <= spec.programs and len(work) <= len(unit_row) + 2 * spec.programs + 1
    merges = np.zeros((spec.programs, 2), dtype=np.int32)
    merges[: len(cut), 0], merges[: len(cut), 1] = unit_first[cut], unit_parts[cut]
    starts = np.full(spec.programs + 1, len(work), dtype=np.int32)
    return HostSplitPlan(work, starts, merges, queued=True)
