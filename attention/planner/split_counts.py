"""Plans made of split counts: every row in equal parts, longest parts first, taken from a queue.

FlashAttention-3's form, used by fa3.py and greedy.py.  Programs take the next piece as they become
free, so the order matters and no piece is assigned.
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
    """Split counts -> (blocks of a part, parts that are not empty).

    A part has ceil(blocks / count) blocks and the last one what is left, so that fewer parts than
    asked for may hold all: 5 blocks in 4 parts are 2, 2 and 1.  A row without blocks has one part.
    """
    part = -(-blocks // counts)
    return part, np.maximum(-(-blocks // np.maximum(part, 1)), 1)


def plan_of_counts(rows: PlannedRows, counts: Int32Array, spec: SplitPlanSpec) -> HostSplitPlan:
    """Cut row i of `rows` into counts[i] >= 1 parts for each KV head.

    Order of `work`: rows by the length of their parts, longest first and equal ones in the order of
    the batch; in a row by head, then along the KV.  `merges` has an entry for each cut row and head
    in the same order.  The caller keeps to spec.capacity pieces and spec.programs merges.
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
