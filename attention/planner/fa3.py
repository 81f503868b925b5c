"""FlashAttention-3's dynamic split heuristic: the baseline, and the greedy planner's start.

Each row is split by the mean load of a program with a margin of 1.1, which often gives too many
splits for one wave and too few for two: what the other planners improve on.

Source: flash-attention, hopper/flash_prepare_scheduler.cu and heuristics.h.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attention.planner.split_counts import plan_of_counts
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlanSpec, planned_rows

MARGIN = np.float32(1.1)  # on the mean, because splits are whole blocks
MAX_SPLITS = 128  # FlashAttention-3's limit per row
MAX_SPLIT_ROWS = 992  # larger batches are not split: one thread block plans them


def plan_fa3(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec, cap: int | None = None
) -> HostSplitPlan:
    """The plan of FlashAttention-3 for spec.programs programs; cap as in `fa3_counts`."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    cap = split_cap(spec.kv_heads, spec.programs) if cap is None else cap
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
