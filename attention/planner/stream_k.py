"""The stream-K planner (`stream-k`): each program gets an equal, contiguous share of all KV.

Rows and KV heads are concatenated, each as long as its blocks plus the fixed cost of a work tile;
the sequence is divided into equal shares wherever they fall.  Including the fixed cost, a
program that starts or ends inside a row does not end later than the others.  A program has at most
two partial work tiles, its first and its last, whatever the lengths.

Adjacent KV heads of a page are adjacent in memory, and concurrent reads of one DRAM page are faster
(1 to 2 % on an H100).  So heads are interleaved: with g = gcd(kv_heads, programs), a plan is made
for every g-th head and a g-th of the programs, and repeated for the g - 1 heads after each, so that
g programs read the same blocks of g adjacent heads at the same time.

Closed form: a prefix sum over the rows and one search per program.  stream_k_device.py computes the
same integers on the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from attention.planner.split_plan import (
    EIGHTHS,
    HEAD,
    HostSplitPlan,
    Int32Array,
    SplitPlanSpec,
    planned_rows,
    work_tiles_of,
)


def interleaved_heads(spec: SplitPlanSpec) -> int:
    """g: the number of adjacent KV heads that get the same plan, each on its own programs."""
    return gcd(spec.kv_heads, spec.programs)


def plan_stream_k(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """Divide the rows' KV into spec.programs shares of equal cost.

    Shares have at least min_blocks blocks: with little work some programs get none.  A program's
    load is at most its share + one block + work_tile_cost.  With g = interleaved_heads(spec),
    program j * (programs / g) + p reads of head h * g + j what program p reads of head h * g.
    """
    g = interleaved_heads(spec)
    head_spec = replace(spec, kv_heads=spec.kv_heads // g, programs=spec.programs // g)
    one = _plan_flat(cu_seqlens_q, cache_seqlens, head_spec)
    work_tiles = len(one.work)
    work = np.tile(one.work, (g, 1))
    work[:, HEAD] = work[:, HEAD] * g + np.repeat(np.arange(g), work_tiles)
    offset = np.arange(g, dtype=np.int32) * work_tiles
    starts = np.append((offset[:, None] + one.starts[:-1]).ravel(), np.int32(g * work_tiles))
    merges = np.repeat(one.merges, g, axis=0)  # g consecutive entries per split row
    merges[:, 0] += np.where(merges[:, 1] > 0, np.tile(offset, head_spec.programs), 0)
    return HostSplitPlan(work, starts, merges, queued=False)


def _plan_flat(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """The plan of all KV heads of spec, concatenated."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    heads, programs = spec.kv_heads, spec.programs
    starts = np.zeros(programs + 1, dtype=np.int32)
    merges = np.zeros((programs, 2), dtype=np.int32)
    if len(rows.row) == 0:
        return HostSplitPlan(np.zeros((0, 8), dtype=np.int32), starts, merges, queued=False)
    cost = np.maximum(rows.blocks.astype(np.int64) * EIGHTHS + spec.work_tile_cost, 1)
    ends = np.cumsum(cost * heads)  # [R]
    total = int(ends[-1])
    used = min(max(total // (EIGHTHS * spec.min_blocks), 1), programs)

    # Where each share begins: unit = row * heads + head, and the block inside the unit.
    bound = np.arange(used + 1) * total // used
    row = np.minimum(np.searchsorted(ends, bound, side="right"), len(ends) - 1)
    inside = bound - (ends[row] - cost[row] * heads)
    head, inside = np.divmod(inside, cost[row])
    block = np.clip((inside - spec.work_tile_cost + EIGHTHS // 2) // EIGHTHS, 0, rows.blocks[row])
    unit = row * heads + head
    past = (block >= rows.blocks[row]) & (block > 0)  # rounded to the unit's end: the next unit
    unit, block = unit + past, np.where(past, 0, block)
    unit[0], block[0] = 0, 0
    unit[used], block[used] = len(rows.row) * heads, 0

    # A work tile begins at the start of each unit and at each cut.
    cut = block > 0
    cuts = np.cumsum(cut)
    starts[: used + 1] = unit + cuts
    starts[used + 1 :] = starts[used]
    units = np.arange(len(rows.row) * heads)
    unit_row, unit_head = np.divmod(units, heads)
    all_units = np.concatenate([units, unit[cut]])
    first = np.concatenate([np.zeros_like(units), block[cut]])
    order = np.lexsort((first, all_units))
    all_units, first = all_units[order], first[order]
    same = np.append(all_units[1:] == all_units[:-1], False)
    end = np.where(same, np.append(first[1:], 0), rows.blocks[unit_row[all_units]])
    index, head = unit_row[all_units], unit_head[all_units]
    work = work_tiles_of(rows, index, head, first, end, spec)

    # `merges` has one entry per unit that is cut, at its first cut.
    before = np.append(False, cut[:-1]) & (unit == np.append(-1, unit[:-1]))
    first_cut = np.flatnonzero(cut & ~before)
    merges[: len(first_cut), 0] = starts[first_cut] - 1
    merges[: len(first_cut), 1] = np.bincount(all_units)[unit[first_cut]]
    return HostSplitPlan(work, starts, merges, queued=False)
