"""The greedy planner: split counts that fill whole waves of programs.

FlashAttention-3 cuts rows by their mean load and takes what number of parts comes out.  A few parts
more than programs make a second wave, nearly empty and as long as the first.  This planner asks the
other way round: with the parts of so many full waves, how short can the longest part be?

The published strategy takes parts away from FlashAttention-3's counts, one at a time and always
where the remaining parts stay shortest, until one wave holds them.  What it ends with is the
smallest T such that parts of at most T blocks fit one wave, and T is found by bisection: the same
longest part, without a loop over rows.  For one wave more the search is the same.

Three candidates are priced: FlashAttention-3's counts, the fewest waves, and one wave more.  More
waves than that gained nothing in simulation.  The cheapest is taken and FlashAttention-3's if it is
as cheap, so that by this price no plan is worse than the baseline.

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

THRESHOLDS = 8  # lengths at which the price counts parts, evenly from the longest part down


def plan_greedy(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec, cap: int | None = None
) -> HostSplitPlan:
    """The cheapest of three plans for spec.programs programs; cap as in `fa3_counts`."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    cap = split_cap(spec.kv_heads, spec.programs) if cap is None else cap
    return plan_of_counts(rows, greedy_counts(rows.blocks, spec, cap), spec)


def greedy_counts(blocks: Int32Array, spec: SplitPlanSpec, cap: int) -> Int32Array:
    """blocks [R] -> split counts [R]; all in integers, so that the device finds the same."""
    fewest_waves = -(-len(blocks) * spec.kv_heads // spec.programs)
    candidates = [fa3_counts(blocks, spec, cap)]
    for waves in (fewest_waves, fewest_waves + 1):
        largest = largest_part(blocks, spec, waves)
        candidates.append(np.maximum(-(-blocks // largest), 1).astype(np.int32))
    prices = [price(blocks, counts, spec) for counts in candidates]
    return candidates[prices.index(min(prices))]


def largest_part(blocks: Int32Array, spec: SplitPlanSpec, waves: int) -> int:
    """The smallest T >= 1 such that rows in ceil(blocks / T) parts fit `waves` waves of programs.

    They must fit the buffers of a SplitPlan too: at most 2 * programs parts more than (row, head),
    and at most `programs` of those cut.  Where nothing fits, the longest row: no row is cut.
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
    """A lower bound of what a queue of these parts takes, combine included, in eighths of a block.

    The largest of the mean load and, for 8 lengths x = ceil(longest * j / 8), of the waves that the
    parts of at least x blocks make, each x long.  Parts of one length, last parts of rows counted
    as full: exact.
    """
    heads, programs, fixed = spec.kv_heads, spec.programs, spec.work_tile_cost
    part, parts = part_of(blocks, counts)
    work_tiles = int(parts.sum(dtype=np.int64)) * heads
    total = int(blocks.sum(dtype=np.int64)) * heads * EIGHTHS
    cost = -(-(total + fixed * work_tiles) // programs)
    longest = int(part.max(initial=0))
    for j in range(1, THRESHOLDS + 1):
        length = -(-longest * j // THRESHOLDS)
        long_pieces = int(parts[part >= length].sum(dtype=np.int64)) * heads
        cost = max(cost, -(-long_pieces // programs) * (fixed + EIGHTHS * length))
    partials = int(parts[parts > 1].sum(dtype=np.int64)) * heads
    if partials:
        cost += spec.merge_cost + spec.merge_tile_cost * partials // programs
    return cost
