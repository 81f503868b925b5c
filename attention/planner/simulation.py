"""What a plan takes: the time of its slowest program, in blocks, and the least any plan could take.

Two machines.  Both charge spec.work_tile_cost for each piece, during which nothing is read.

  bound by programs   each does a block a unit of time, whatever the others do (`rho` 1)
  bound by memory     all together do `programs` blocks a unit; one does at most `rho` of them, so
                      that those still working speed up when others have ended

Several programs resident on a multiprocessor count as that many machines.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from attention.planner.split_plan import (
    EIGHTHS,
    END,
    FIRST,
    PARTIAL,
    HostSplitPlan,
    Int32Array,
    SplitPlanSpec,
    planned_rows,
)


def work_tile_blocks(plan: HostSplitPlan, spec: SplitPlanSpec) -> NDArray[np.int64]:
    """Blocks of KV that each piece of the plan reads."""
    work = plan.work.astype(np.int64)
    return -(-work[:, END] // spec.block) - work[:, FIRST] // spec.block


def makespan(plan: HostSplitPlan, spec: SplitPlanSpec, rho: float = 1.0) -> float:
    """Time until the last program ends, combine apart; 0 for an empty plan."""
    blocks = work_tile_blocks(plan, spec)
    if len(blocks) == 0:
        return 0.0
    if rho != 1.0:
        return _shared(plan, blocks, spec, rho)
    costs = blocks * EIGHTHS + spec.work_tile_cost
    if not plan.queued:
        ends = np.append(0, np.cumsum(costs))[plan.starts]
        return int(np.diff(ends).max()) / EIGHTHS
    ready = [0] * spec.programs
    for cost in costs.tolist():
        heapq.heapreplace(ready, ready[0] + cost)
    return max(ready) / EIGHTHS


def _shared(
    plan: HostSplitPlan, blocks: NDArray[np.int64], spec: SplitPlanSpec, rho: float
) -> float:
    """All who work go at one speed, min(rho, programs / workers): so count the blocks each could
    have done since the start, and a worker ends when that count reaches what it is then due."""
    if plan.queued:
        queue = iter(range(len(blocks)))
        queues = [queue] * spec.programs
    else:
        queues = [iter(range(a, b)) for a, b in zip(plan.starts, plan.starts[1:], strict=False)]
    latency = spec.work_tile_cost / EIGHTHS
    now = done = 0.0  # time; blocks that one who worked all along would have done
    filling: list[tuple[float, int, int]] = []  # time when it begins to read, program, piece
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
    """Time of merging what was cut; 0 if nothing was."""
    partials = int(plan.work[:, PARTIAL].sum())
    if partials == 0:
        return 0.0
    return (spec.merge_cost + spec.merge_tile_cost * partials / spec.programs) / EIGHTHS


def lower_bound(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec, rho: float = 1.0
) -> float:
    """No plan of these rows has a smaller makespan.

    If no piece has more than k blocks, the makespan is at least that of one such piece, at least
    the mean load with ceil(blocks / k) pieces a row, and, with shared memory, all blocks over all
    programs.  The least over k of the largest of these.
    """
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    if len(rows.row) == 0:
        return 0.0
    blocks, fixed = rows.blocks.astype(np.int64), spec.work_tile_cost
    total = int(blocks.sum()) * spec.kv_heads * EIGHTHS

    def alone(largest: int) -> float:
        return fixed + largest * EIGHTHS / rho

    def mean(largest: int) -> float:
        work_tiles = int(np.maximum(-(-blocks // largest), 1).sum()) * spec.kv_heads
        return (total / rho + fixed * work_tiles) / spec.programs

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
        grid = math.gcd(fixed, EIGHTHS)
        bound = math.ceil(bound / grid - 1e-9) * grid
    return max(bound, total / spec.programs) / EIGHTHS
