"""Queued plans from num_splits: every row in equal splits, longest first.

FlashAttention-3's form, used by fa3.py and greedy.py.  Programs take the next work tile from a
queue as they become free, so that the order matters and no tile is assigned to a program.
"""

from __future__ import annotations

import numpy as np

from attention.planner.split_plan import (
    HostSplitPlan,
    Int32Array,
    PlannedRows,
    SplitPlanSpec,
    work_tiles_of,
)


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
