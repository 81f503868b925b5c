"""Simulated makespan of a plan, in blocks, and a lower bound of every plan's makespan.

Two machine models, both with spec.work_tile_cost per work tile, during which nothing is read:

  bound by programs   each program reads a block per unit of time, independent of others (`rho` 1)
  bound by memory     all programs together read `programs` blocks per unit, one at most `rho`, so
                      that those still running speed up when others have ended

Several CTAs on an SM count as that many programs.
"""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from attention.planner.split_plan import (
    EIGHTHS,
    END,
    FIRST,
    PARTIAL,
    ROW,
    HostSplitPlan,
    Int32Array,
    SplitPlanSpec,
    planned_rows,
)


def work_tile_blocks(plan: HostSplitPlan, spec: SplitPlanSpec) -> NDArray[np.int64]:
    """Blocks of KV that each work tile of the plan reads."""
    work = plan.work.astype(np.int64)
    return -(-work[:, END] // spec.block) - work[:, FIRST] // spec.block


def makespan(plan: HostSplitPlan, spec: SplitPlanSpec, rho: float = 1.0) -> float:
    """Time until the last program ends, without the combine; 0 for an empty plan."""
    blocks = work_tile_blocks(plan, spec)
    if len(blocks) == 0:
        return 0.0
    if rho != 1.0:
        return _memory_bound_makespan(plan, blocks, spec, rho)
    costs = blocks * EIGHTHS + spec.work_tile_cost
    if not plan.queued:
        ends = np.append(0, np.cumsum(costs))[plan.starts]
        return int(np.diff(ends).max()) / EIGHTHS
    ready = [0] * spec.programs
    for cost in costs.tolist():
        heapq.heapreplace(ready, ready[0] + cost)
    return max(ready) / EIGHTHS


def program_loads(plan: HostSplitPlan, spec: SplitPlanSpec) -> list[list[tuple[int, int]]]:
    """What each program does, in order, where none waits for another's reads (`rho` 1).

    (row of the step, eighths of a block); consecutive work tiles of a row are one entry.  The
    largest sum of a program is the plan's makespan.
    """
    costs = (work_tile_blocks(plan, spec) * EIGHTHS + spec.work_tile_cost).tolist()
    rows: list[int] = plan.work[:, ROW].tolist()
    loads: list[list[tuple[int, int]]] = [[] for _ in range(spec.programs)]

    def add(program: int, tile: int) -> None:
        load, row, cost = loads[program], rows[tile], costs[tile]
        if load and load[-1][0] == row:
            cost += load.pop()[1]
        load.append((row, cost))

    if not plan.queued:
        for program, (first, end) in enumerate(itertools.pairwise(plan.starts.tolist())):
            for tile in range(first, end):
                add(program, tile)
        return loads
    ready = [(0, program) for program in range(spec.programs)]
    for tile, cost in enumerate(costs):
        at, program = ready[0]
        heapq.heapreplace(ready, (at + cost, program))
        add(program, tile)
    return loads


def _memory_bound_makespan(
    plan: HostSplitPlan, blocks: NDArray[np.int64], spec: SplitPlanSpec, rho: float
) -> float:
    """Makespan with shared bandwidth, by events.

    All reading programs have one speed, min(rho, programs / readers).  `done` counts the blocks
    that a program reading since the start would have read; a tile ends when `done` reaches its due.
    """
    if plan.queued:
        queue = iter(range(len(blocks)))
        queues = [queue] * spec.programs
    else:
        queues = [iter(range(a, b)) for a, b in zip(plan.starts, plan.starts[1:], strict=False)]
    latency = spec.work_tile_cost / EIGHTHS
    now = done = 0.0
    filling: list[tuple[float, int, int]] = []  # time when it begins to read, program, work tile
    working: list[tuple[float, int]] = []  # `done` when it ends, program

    def take(program: int) -> None:
        if (work_tile := next(queues[program], None)) is not None:
            heapq.heappush(filling, (now + latency, program, work_tile))

    for program in range(spec.programs):
        take(program)
    while filling or working:
        speed = min(rho, spec.programs / len(working)) if working else 1.0
        ends = now + (working[0][0] - done) / speed if working else math.inf
        if filling and filling[0][0] <= ends:
            begins, program, work_tile = heapq.heappop(filling)
            done += (begins - now) * speed if working else 0.0
            now = begins
            heapq.heappush(working, (done + int(blocks[work_tile]), program))
        else:
            now, done = ends, working[0][0]
            take(heapq.heappop(working)[1])
    return now


def combine_time(plan: HostSplitPlan, spec: SplitPlanSpec) -> float:
    """Time of combining the partial results; 0 if there are none."""
    partials = int(plan.work[:, PARTIAL].sum())
    if partials == 0:
        return 0.0
    return (spec.merge_cost + spec.merge_tile_cost * partials / spec.programs) / EIGHTHS


def lower_bound(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec, rho: float = 1.0
) -> float:
    """A lower bound of the makespan of every plan of these rows.

    If no work tile has more than k blocks, the makespan is at least that of one tile of k blocks,
    the mean load with ceil(blocks / k) tiles per row, and, with shared bandwidth, all blocks over
    all programs.  The minimum over k of the maximum of these.
    """
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    if len(rows.row) == 0:
        return 0.0
    blocks, tile_cost = rows.blocks.astype(np.int64), spec.work_tile_cost
    total = int(blocks.sum()) * spec.kv_heads * EIGHTHS

    def alone(largest: int) -> float:
        return tile_cost + largest * EIGHTHS / rho

    def mean(largest: int) -> float:
        work_tiles = int(np.maximum(-(-blocks // largest), 1).sum()) * spec.kv_heads
        return (total / rho + tile_cost * work_tiles) / spec.programs

    low, high = 1, max(int(blocks.max()), 1)
    while low < high:  # `alone` grows with k and `mean` falls: where they cross
        middle = (low + high) // 2
        if alone(middle) >= mean(middle):
            high = middle
        else:
            low = middle + 1
    smallest = 0 if int(blocks.max()) == 0 else 1
    bound = min(max(alone(k if smallest else 0), mean(k)) for k in {max(low - 1, 1), low})
    if rho == 1.0:  # loads are multiples of this
        grid = math.gcd(tile_cost, EIGHTHS)
        bound = math.ceil(bound / grid - 1e-9) * grid
    return max(bound, total / spec.programs) / EIGHTHS
