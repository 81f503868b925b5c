"""merge_splits: merges the partial results of tiles whose KV a batch-invariant plan has split.

grid      fixed (2 * plan.spec.programs), so that a graph can replay any step; program p runs work
          p, p + programs and so on, each ROWS packed query rows of a tile and KV head.  All exit at
          once if no tile is split
reads     plan.partial_out, partial_lse, items, merges
writes    out [T, heads, D], lse [T, heads]
math      float32, base 2: `add_split` for one split after the other, as kernel.py does it in
          registers.  Its fused multiply-adds are explicit, so that the compiler fuses no others
bound     memory: the partial results
checked   tests/attention/batch_invariant/test_batch_invariant_attention.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.batch_invariant.plan import UNIT_ROWS, BatchInvariantPlan
from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, finish

ROWS, TOGETHER = 4, 4  # packed query rows of a program, and splits whose loads are in flight


@triton.jit
def add_split(m, total, acc, lse, out):
    """Add the next split to the running (maximum, sum, weighted values)."""
    m_new = tl.maximum(m, lse)
    weight, alpha = tl.exp2(lse - m_new), tl.exp2(m - m_new)
    total = tl.fma(total, alpha, weight)
    # One of the two products is explicit: the compiler must not choose which one to fuse.
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), out * weight[:, None])
    return m_new, total, acc


@triton.jit
def _merge_splits(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, ITEMS, MERGES, COUNTS,
    out_token, out_head, lse_token, partial_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, UNIT_ROWS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK_M // ROWS
    work = tl.load(COUNTS + 1) * (KV_HEADS * parts)
    if DEPENDENT:
        wait_for_launcher()
    d = tl.arange(0, BLOCK_D)
    w = tl.program_id(0)
    while w < work:
        merge, head, part = w // (KV_HEADS * parts), w // parts % KV_HEADS, w % parts
        first, splits = tl.load(MERGES + merge * 2), tl.load(MERGES + merge * 2 + 1)
        item = ITEMS + first * 8
        tile, q_start = tl.load(item + 1), tl.load(item + 4)
        q_len, unit = tl.load(item + 5), tl.load(item + 7)
        row = part * ROWS + tl.arange(0, ROWS)
        r = tile * BLOCK_M + row
        real = r < q_len * GROUP
        if tile * BLOCK_M + part * ROWS < q_len * GROUP:
            height = tl.minimum(
                (q_len * GROUP + (UNIT_ROWS - 1)) // UNIT_ROWS, BLOCK_M // UNIT_ROWS
            )
            slot = head.to(tl.int64) * partial_head + unit * UNIT_ROWS + row
            m = tl.full([ROWS], M_INIT, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for start in range(0, splits, TOGETHER):
                for i in tl.static_range(TOGETHER):
                    valid = real & (start + i < splits)
                    at = slot + (start + i) * height * UNIT_ROWS
                    lse = tl.load(PARTIAL_LSE + at, mask=valid, other=float("-inf"))
                    out_at = PARTIAL_OUT + at[:, None] * D + d[None, :]
                    inside = valid[:, None] & (d < D)[None, :]
                    out = tl.load(out_at, mask=inside, other=0.0)
                    m, total, acc = add_split(m, total, acc, lse, out)
            heads = head * GROUP + r % GROUP
            token = (q_start + r // GROUP).to(tl.int64)
            factor, lse = finish(m, total, SINKS, heads, real)
            out_at = OUT + (token * out_token + heads * out_head)[:, None] + d[None, :]
            inside = real[:, None] & (d < D)[None, :]
            tl.store(out_at, (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside)
            if LSE is not None:
                tl.store(LSE + token * lse_token + heads, lse, mask=real)
        w += tl.num_programs(0)


def merge_splits(plan: BatchInvariantPlan, inputs: KernelInputs) -> None:
    """Write out and lse of the tiles in plan.merges, from plan.partial_out and partial_lse."""
    spec, head_dim = plan.spec, inputs.out.shape[-1]
    _merge_splits[(2 * spec.programs,)](
        plan.partial_out, plan.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        plan.items, plan.merges, plan.counts, *inputs.out_strides(), plan.partial_lse.stride(0),
        KV_HEADS=spec.kv_heads, GROUP=spec.group, BLOCK_M=spec.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), UNIT_ROWS=UNIT_ROWS, ROWS=ROWS,
        TOGETHER=TOGETHER, num_warps=4, **dependent_launch(inputs.out.device),
    )  # fmt: skip
