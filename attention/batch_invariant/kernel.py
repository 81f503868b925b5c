"""Batch-invariant attention over paged KV: results are bitwise independent of batch and chunks.

batch_invariant (`--attention batch-invariant`): prefill and decode rows in one kernel.
  grid      fixed (plan.spec.programs), so that a graph can replay any step; program p runs work
            p, p + programs and so on, each an item and a KV head
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            of K and V nothing past the last position that a tile sees, nothing before its window
  writes    out [T, heads, D], lse [T, heads]; for split tiles partial_out and partial_lse of the
            plan, for merge.py
  math      online softmax in base 2 over blocks of BLOCK_N keys, restarted at each KV split of
            spec.split positions; `add_split` adds the splits in order, in registers or through
            memory.  A masked key has weight 0 and changes no bit of a query's result, so neither
            do the other queries of its tile.  One tile size, one loop and explicit fused
            multiply-adds: the same instructions for every row
  bound     memory for decode, compute for prefill
  checked   tests/attention/batch_invariant/test_batch_invariant_attention.py: against a float64
            oracle, and bit for bit alone, in batches and in chunks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.batch_invariant.merge import add_split, merge_splits
from attention.batch_invariant.plan import UNIT_ROWS, BatchInvariantPlan
from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import LOG2E, M_INIT, dot, finish, to_logits


@triton.jit
def _kv_split(
    q, position, bottom, K, V, table, first, end, k_page, k_token, v_page, v_token, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys first..end -> (normalized output, lse in base 2; -inf: no key seen)."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m = tl.full([q.shape[0]], M_INIT, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    factor = tl.maximum(scale * LOG2E, 1e-30)  # also for a scale of 0: -inf * 0 is NaN
    if SOFTCAP:
        factor = 1.0
    factors = tl.full([q.shape[0], BLOCK_N], factor, tl.float32)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        valid = key < end
        if WINDOW > 0:
            valid = valid & (key >= bottom)
        page = tl.load(table + key // PAGE, mask=valid, other=0).to(tl.int64)
        mask = valid[:, None]
        if BLOCK_D != D:
            mask = mask & (d < D)[None, :]
        k_at = K + (page * k_page + key % PAGE * k_token)[:, None] + d[None, :]
        k = tl.load(k_at, mask=mask, other=0.0).to(q.dtype)
        s = dot(q, tl.trans(k), None, PRECISION)
        if SOFTCAP:
            s = to_logits(s, scale, softcap, SOFTCAP)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(tl.fma(s, factors, tl.broadcast_to(-m_new[:, None], s.shape)))
        alpha = tl.exp2(m - m_new)
        total = tl.fma(total, alpha, tl.sum(p, 1))
        m = m_new
        v_at = V + (page * v_page + key % PAGE * v_token)[:, None] + d[None, :]
        v = tl.load(v_at, mask=mask, other=0.0).to(q.dtype)
        acc = dot(p.to(q.dtype), v, acc * alpha[:, None], PRECISION)
    safe_total = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(safe_total))
    return acc * (1.0 / safe_total)[:, None], lse


@triton.jit
def _item(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, ITEMS, index,
    head, q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, partial_head, scale, softcap,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UNIT_ROWS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item = ITEMS + index * 8
    row, tile = tl.load(item), tl.load(item + 1)
    first, end = tl.load(item + 2), tl.load(item + 3)
    q_start, q_len = tl.load(item + 4), tl.load(item + 5)
    kv_len, unit = tl.load(item + 6), tl.load(item + 7)
    i = tl.arange(0, BLOCK_M)
    r, d = tile * BLOCK_M + i, tl.arange(0, BLOCK_D)
    real = r < q_len * GROUP
    inside = real[:, None] & (d < D)[None, :]
    token = (q_start + r // GROUP).to(tl.int64)
    heads = head * GROUP + r % GROUP
    q_at = Q + (token * q_token + heads * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    if K_SCALE is not None:
        scale = scale * tl.load(K_SCALE + head)
    # The first key that any query of the tile sees: pages before it may be another sequence's.
    bottom = kv_len - q_len + tile * BLOCK_M // GROUP + 1 - WINDOW
    m = tl.full([BLOCK_M], M_INIT, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(first, tl.maximum(end, first + 1), SPLIT):
        out, lse = _kv_split(
            q, kv_len - q_len + r // GROUP, bottom, K + head.to(tl.int64) * k_head,
            V + head.to(tl.int64) * v_head, TABLE + row.to(tl.int64) * table_row,
            split, tl.minimum(split + SPLIT, end), k_page, k_token, v_page, v_token,
            scale, softcap, D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        if V_SCALE is not None:
            out = out * tl.load(V_SCALE + head)
        if unit < 0:
            m, total, acc = add_split(m, total, acc, lse, out)
        else:
            slot = head.to(tl.int64) * partial_head + unit * UNIT_ROWS + i
            tl.store(PARTIAL_OUT + slot[:, None] * D + d[None, :], out, mask=inside)
            tl.store(PARTIAL_LSE + slot, lse, mask=real)
    if unit < 0:
        factor, lse = finish(m, total, SINKS, heads, real)
        out_at = OUT + (token * out_token + heads * out_head)[:, None] + d[None, :]
        tl.store(out_at, (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside)
        if LSE is not None:
            tl.store(LSE + token * lse_token + heads, lse, mask=real)


@triton.jit(do_not_specialize=["table_row"])
def _batch_invariant(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, ITEMS, COUNTS,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, partial_head, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    UNIT_ROWS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    work = tl.load(COUNTS) * KV_HEADS
    if DEPENDENT:
        wait_for_launcher()
    w = tl.program_id(0)
    while w < work:
        _item(
            Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
            ITEMS, w // KV_HEADS, w % KV_HEADS,
            q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
            out_token, out_head, lse_token, partial_head, scale, softcap, GROUP, BLOCK_M, D,
            BLOCK_D, PAGE, BLOCK_N, SPLIT, UNIT_ROWS, STAGES, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        w += tl.num_programs(0)


@dataclass(frozen=True, slots=True)
class BatchInvariantConfig:
    """Tile sizes and compile options; results depend bitwise on block_m, block_n and split."""

    block_m: int
    block_n: int
    split: int
    warps: int
    stages: int
    ctas_per_sm: int


def batch_invariant_config(head_dim: int, dtype: torch.dtype) -> BatchInvariantConfig:
    """The configuration for this head_dim and q dtype: the same for every row of every step."""
    if dtype == torch.float32:
        return BatchInvariantConfig(
            block_m=32, block_n=32, split=512, warps=4, stages=1, ctas_per_sm=1
        )
    if head_dim > 128:
        return BatchInvariantConfig(
            block_m=64, block_n=32, split=512, warps=8, stages=3, ctas_per_sm=1
        )
    return BatchInvariantConfig(block_m=64, block_n=64, split=512, warps=4, stages=3, ctas_per_sm=2)


def batch_invariant_attention(
    inputs: KernelInputs, plan: BatchInvariantPlan, *, config: BatchInvariantConfig | None = None
) -> None:
    """Attention of all rows of the plan.

    Query i of a row sees keys up to its position kv_len - q_len + i, within plan.spec.window.
    Source: FlashAttention-2, and Flash-Decoding with splits of a fixed size.
    """
    q, k, spec = inputs.q, inputs.k, plan.spec
    head_dim, kv_heads, page = q.shape[-1], k.shape[1], k.shape[2]
    config = config or batch_invariant_config(head_dim, q.dtype)
    assert (kv_heads, kv_heads * spec.group) == (spec.kv_heads, q.shape[1]), "plan of other heads"
    assert plan.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    assert (spec.block_m, spec.split) == (config.block_m, config.split), "plan of other tiles"
    assert config.split % config.block_n == 0
    _batch_invariant[(spec.programs,)](
        q, k, inputs.v, inputs.page_table, plan.partial_out, plan.partial_lse, inputs.out,
        inputs.lse, inputs.sinks, inputs.k_scale, inputs.v_scale, plan.items, plan.counts,
        *inputs.strides(), plan.partial_lse.stride(0), inputs.scale, inputs.softcap,
        KV_HEADS=kv_heads, GROUP=spec.group, BLOCK_M=config.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), PAGE=page, BLOCK_N=config.block_n,
        SPLIT=config.split, UNIT_ROWS=UNIT_ROWS, STAGES=config.stages, WINDOW=spec.window,
        SOFTCAP=inputs.softcap > 0, PRECISION=inputs.precision, num_warps=config.warps,
        **dependent_launch(q.device),
    )  # fmt: skip
    merge_splits(plan, inputs)
