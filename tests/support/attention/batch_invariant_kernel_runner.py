"""Runs the batch-invariant kernel over a case, or over steps that hold parts of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from attention.batch_invariant.kernel import BatchInvariantConfig, batch_invariant_attention
from attention.batch_invariant.plan import BatchInvariantPlan, BatchInvariantSpec
from attention.batch_invariant.plan_device import BatchInvariantPlanner
from tests.support.attention.attention_oracle import OracleCase

# Small tiles, so that a few tokens make several of them and the interpreter stays quick.
SMALL = BatchInvariantConfig(block_m=32, block_n=16, split=32, warps=4, stages=2, ctas_per_sm=1)
Part = tuple[int, int, int]  # row of the case, its first position of the step, and the end


def run_parts(
    case: OracleCase, parts: Sequence[Part], *, config: BatchInvariantConfig = SMALL, **options: int
) -> tuple[Tensor, Tensor, BatchInvariantPlan]:
    """(out, lse) of a step that feeds these parts; the case's rows are whole prompts.

    options  of BatchInvariantSpec: programs, units
    """
    device = case.q.device
    spec = BatchInvariantSpec(
        kv_heads=case.kv_heads, group=case.group, block_m=config.block_m, split=config.split,
        window=case.window, **{"programs": 4, "units": 64, **options},
    )  # fmt: skip
    q = torch.cat([case.q[case.tokens(row)][first:end] for row, first, end in parts])
    planner = BatchInvariantPlanner(
        spec, max_tokens=len(q), max_rows=len(parts), head_dim=q.shape[-1], device=device
    )
    sums = [0, *accumulate(end - first for _, first, end in parts)]
    lengths = [end for _, _, end in parts]
    plan = planner.plan(
        torch.tensor(sums, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    plan.partial_out.fill_(float("nan"))
    plan.partial_lse.fill_(float("nan"))
    table = case.page_table[[row for row, _, _ in parts]]
    out = torch.full_like(q, float("nan"))
    lse = out.new_full(out.shape[:2], float("nan"), dtype=torch.float32)
    inputs = replace(case, q=q, page_table=table).inputs(out, lse)
    batch_invariant_attention(inputs, plan, config=config)
    return out, lse, plan


def run(case: OracleCase, **options: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of the case, whose rows may have keys before their tokens."""
    parts = [(row, kv_len - q_len, kv_len) for row, (q_len, kv_len) in enumerate(case.rows)]
    shifted = _whole(case)
    out, lse, _ = run_parts(shifted, parts, **options)
    return out, lse


def _whole(case: OracleCase) -> OracleCase:
    """The case with made-up queries before those of each row, so that positions index them."""
    rows = [case.q[case.tokens(row)] for row in range(len(case.rows))]
    padded = [
        torch.cat([own.new_zeros(kv_len - len(own), *own.shape[1:]), own])
        for own, (_, kv_len) in zip(rows, case.rows, strict=True)
    ]
    lengths = tuple((kv_len, kv_len) for _, kv_len in case.rows)
    return replace(case, rows=lengths, q=torch.cat(padded))
