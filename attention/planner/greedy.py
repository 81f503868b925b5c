"""The greedy planner: num_splits that fill whole waves of programs.

FlashAttention-3 splits rows by the mean load and accepts whatever number of splits results.  A few
more splits than programs make a second wave, nearly empty and as long as the first.  This planner
solves the inverse: given the splits of n full waves, how short can the longest split be?

The published strategy removes splits from FlashAttention-3's counts, one at a time and always where
the remaining splits stay shortest, until one wave holds them.  The result is the smallest T such
that splits of at most T blocks fit one wave; bisection finds T without a loop over rows.  For one
more wave the search is the same.

Three candidates are priced: FlashAttention-3's counts, the fewest waves, and one wave more.  More
waves gained nothing in simulation.  The cheapest is taken, FlashAttention-3's on a tie, so that at
this price no plan is worse than the baseline.

Source: "Beating Wave Quantization: Sequence Split Optimization for FlashAttention", 2025.
"""

from __future__ import annotations

import numpy as np

from attention.planner.fa3 import fa3_counts, split_cap
from attention.planner.split_counts import part_of, plan_of_counts
from attention.planner.split_plan import (
    EIGHTHS,
    HostSplitPlan,
    Int32Array,
    SplitPlanSpec,
    planned_rows,
)

THRESHOLDS = 8  # lengths at which the price counts splits, evenly from the longest down


def plan_greedy(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec, cap: int | None = None
) -> HostSplitPlan:
    """The cheapest of three plans for spec.programs programs; cap as in `fa3_counts`."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    cap = split_cap(spec.kv_heads, spec.programs) if cap is None else cap
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
