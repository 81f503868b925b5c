"""Combine: merges the partial results of split rows.

combine
  grid      (merges, queries, blocks of D): merges bounded by the plan's programs and by rows * KV
            heads of the step; programs without a merge exit at once
  reads     partial_out [tiles, queries, D] float32, partial_lse [tiles, queries] in base 2
  writes    out [T, heads, D], lse [T, heads] natural; queue = 0 for the next layer
  math      weights 2^(lse - max) in the order of the work tiles: deterministic for a plan
  bound     latency: a few KB per program
  checked   tests/attention/decode/test_decode_kernel.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import (
    dependent_launch,
    start_successor_and_wait,
    wait_for_launcher,
)
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, finish
from attention.planner.split_plan import SplitPlan

FEW_PROGRAMS = 512  # smaller grids also divide head_dim among programs


@triton.jit
def _combine(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, WORK, MERGES, QUEUE,
    out_token, out_head, lse_token,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, OVERLAPPED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    merge, r, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(MERGES + merge * 2)
    work_tiles = tl.load(MERGES + merge * 2 + 1)
    item = WORK + first * 8
    head, q_start, q_len = tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
    if DEPENDENT:
        if OVERLAPPED:
            if (work_tiles == 0) & (merge > 0):  # the others wait
                return
            start_successor_and_wait()
        else:
            wait_for_launcher()
    if (merge == 0) & (r == 0) & (part == 0):
        tl.store(QUEUE, 0)
    if (work_tiles == 0) | (r >= q_len * GROUP):
        return
    slot = first.to(tl.int64) * QUERIES + r
    d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_P)
    m = M_INIT
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, work_tiles, BLOCK_P):
        valid = start + i < work_tiles
        at = slot + (start + i) * QUERIES
        lse = tl.load(PARTIAL_LSE + at, mask=valid, other=float("-inf"))
        o = tl.load(
            PARTIAL_OUT + at[:, None] * D + d[None, :],
            mask=valid[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        # The output of a work tile that saw no key may be anything.
        o = tl.where((lse > float("-inf"))[:, None], o, 0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(o * weight[:, None], 0)
        m = m_new
    heads = head * GROUP + r % GROUP
    token = (q_start + r // GROUP).to(tl.int64)
    factor, lse = finish(m, total, SINKS, heads, True)
    tl.store(
        OUT + token * out_token + heads * out_head + d,
        (acc * factor).to(OUT.dtype.element_ty), mask=d < D,
    )  # fmt: skip
    if LSE is not None:
        tl.store(LSE + token * lse_token + heads, lse, mask=part == 0)


def combine(plan: SplitPlan, inputs: KernelInputs, *, overlapped: bool = False) -> None:
    """Merge the partial results that the decode kernel wrote into the plan.

    overlapped  launch dependents at once: not where the decode kernel fills the SMs, as the next
                kernel would take the combine's place
    Source: log-sum-exp identity; Flash-Decoding.
    """
    spec = plan.spec
    _, queries, head_dim = plan.partial_out.shape
    group = queries // spec.max_q_len
    merges = min(spec.programs, inputs.page_table.shape[0] * spec.kv_heads)
    block_d = triton.next_power_of_2(head_dim)
    while merges * queries * triton.cdiv(head_dim, block_d) < FEW_PROGRAMS and block_d > 32:
        block_d //= 2
    likely = triton.next_power_of_2(spec.programs // max(merges, 1) + 2)
    block_p = min(max(likely, 4), 4096 // block_d)
    _combine[(merges, queries, triton.cdiv(head_dim, block_d))](
        plan.partial_out, plan.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        plan.work, plan.merges, plan.queue, *inputs.out_strides(),
        GROUP=group, QUERIES=queries, D=head_dim, BLOCK_D=block_d, BLOCK_P=block_p,
        OVERLAPPED=overlapped, num_warps=max(1, min(4, block_p * block_d // 512)),
        # A multiply fused into the reduction over lanes is unrounded in its own lane only: lanes
        # would hold different sums, and the last one to store would win.
        enable_fp_fusion=False, **dependent_launch(inputs.out.device),
    )  # fmt: skip
