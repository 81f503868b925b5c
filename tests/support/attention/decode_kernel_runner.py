"""Runs the decode kernel over a case, by any planner, with every buffer poisoned first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from attention.decode.decode import decode
from attention.planner.queued_plans import plan_fa3, plan_greedy, plan_of_counts
from attention.planner.split_plan import (
    HostSplitPlan,
    Int32Array,
    SplitPlan,
    SplitPlanSpec,
    planned_rows,
)
from attention.planner.stream_k import plan_stream_k
from tests.support.attention.attention_oracle import OracleCase


def plan_whole(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """No row is cut."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    return plan_of_counts(rows, np.ones_like(rows.blocks), spec)


def plan_thin(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> HostSplitPlan:
    """Every row is cut into work tiles of one block, for which spec.programs must be enough."""
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    return plan_of_counts(rows, np.maximum(rows.blocks, 1), spec)


PLANNERS: dict[str, Callable[[Int32Array, Int32Array, SplitPlanSpec], HostSplitPlan]] = {
    "whole": plan_whole,
    "thin": plan_thin,
    "fa3": plan_fa3,
    "greedy": plan_greedy,
    "stream-k": plan_stream_k,
}


def make_plan(
    case: OracleCase,
    planner: str = "stream-k",
    *,
    max_q_len: int = 1,
    programs: int = 7,
    block: int = 16,
) -> tuple[SplitPlan, HostSplitPlan]:
    """A plan that cuts as often as it can; what it does not define is poison.

    `thin` gets as many programs as it needs.
    """
    if planner == "thin":
        blocks = sum(-(-kv_len // block) for _, kv_len in case.rows)
        programs = max(programs, blocks * case.kv_heads // 2)
    spec = SplitPlanSpec(
        kv_heads=case.kv_heads,
        programs=programs,
        max_q_len=max_q_len,
        window=case.window,
        block=block,
        work_tile_cost=0,
        min_blocks=1,
    )
    host = PLANNERS[planner](
        case.cu_seqlens_q.cpu().numpy(), case.cache_seqlens.cpu().numpy(), spec
    )
    plan = SplitPlan.allocate(
        spec,
        max_rows=len(case.rows),
        group=case.group,
        head_dim=case.q.shape[-1],
        queued=host.queued,
        device=case.q.device,
    )
    plan.work.fill_(2**31 - 1)
    plan.load(host)
    poison(plan)
    return plan, host


def poison(plan: SplitPlan) -> None:
    plan.partial_out.fill_(float("nan"))
    plan.partial_lse.fill_(float("nan"))


def run(case: OracleCase, plan: SplitPlan) -> tuple[Tensor, Tensor]:
    """(out, lse) of the rows that the plan serves; NaN in the others."""
    out, lse = case.results()
    decode(case.inputs(out, lse), plan)
    return out, lse


def decoded(case: OracleCase, planner: str = "stream-k", **spec: int) -> tuple[Tensor, Tensor]:
    return run(case, make_plan(case, planner, **spec)[0])


def most(max_q_len: int) -> Callable[[int], bool]:
    """For `check`: the rows that feed at most max_q_len tokens are served."""
    return lambda q_len: 1 <= q_len <= max_q_len
