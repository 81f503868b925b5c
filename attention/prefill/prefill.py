"""Prefill attention over paged KV: persistent FlashAttention-2 over the tiles of a plan.

prefill: prompts and prompt chunks, with or without cached tokens before them.
  grid      fixed (plan.spec.programs), so that a graph can replay any step; a program takes the
            next (item, KV head) from the queue, longest items first
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            of K and V nothing past the last position that a tile sees, nothing before its window
  writes    out [T, heads, D], lse [T, heads]; of tiles split along KV partial_out [block_m, D]
            float32, normalized, and partial_lse [block_m] in base 2, for merge_tiles.py
  math      block_m packed query rows of one KV head; online softmax in base 2, float32 sums;
            only blocks that some query sees in part are masked
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  checked   tests/attention/prefill/test_prefill_kernel.py against a float64 oracle

Page ids are loaded one block ahead and carried by the loop: if they were loaded where they are
used, the pipeliner would spend its stages on them, and keep a single buffer for K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import LOG2E, M_INIT, dot, finish, to_logits
from attention.planner.prefill_tiles import TilePlan
from attention.prefill.merge_tiles import merge_tiles


@triton.jit
def _page_ids(table, start, bottom, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key of a block, or the block's one page; 0 for keys not in bottom..end."""
    if PAGE >= BLOCK_N:
        ids = tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        ids = tl.load(table + key // PAGE, mask=(key >= bottom) & (key < end), other=0)
    return ids


@triton.jit
def _cells(
    ids, start, page_stride, token_stride,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Offsets [BLOCK_N, BLOCK_D] of a block's keys or values."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    if PAGE >= BLOCK_N:
        at = ids.to(tl.int64) * page_stride + (start % PAGE + n) * token_stride
    else:
        at = ids.to(tl.int64) * page_stride + n % PAGE * token_stride
    return at[:, None] + d[None, :]


@triton.jit
def _attend_blocks(
    q, m, total, acc, K, V, table, start, stop, bottom, end, position,
    k_page, k_token, v_page, v_token, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The inner loop over keys start..stop; without EDGE every query sees all of them."""
    MASKED: tl.constexpr = EDGE or BLOCK_D != D
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    factor = tl.maximum(scale * LOG2E, 1e-30)  # also for a scale of 0: -inf * 0 is NaN
    if SOFTCAP:
        factor = 1.0
    ids = _page_ids(table, start, bottom, end, PAGE, BLOCK_N)
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        k_at = _cells(ids, block, k_page, k_token, BLOCK_D, PAGE, BLOCK_N)
        v_at = k_at
        if not SAME_STRIDES:
            v_at = _cells(ids, block, v_page, v_token, BLOCK_D, PAGE, BLOCK_N)
        ids = _page_ids(table, block + BLOCK_N, bottom, end, PAGE, BLOCK_N)
        key = block + n
        valid = (d < D)[None, :]
        if EDGE:
            valid = valid & ((key >= bottom) & (key < end))[:, None]
        k = tl.load(K + k_at, mask=valid, other=0.0) if MASKED else tl.load(K + k_at)
        s = dot(q, tl.trans(k.to(q.dtype)), None, PRECISION)
        if SOFTCAP:
            s = to_logits(s, scale, softcap, SOFTCAP)
        if EDGE:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - m_new[:, None])  # one fused multiply-add per element
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        v = tl.load(V + v_at, mask=valid, other=0.0) if MASKED else tl.load(V + v_at)
        acc = dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], PRECISION)
    return m, total, acc


@triton.jit
def _softmax(
    q, K, V, table, first, end, position, lowest, highest,
    k_page, k_token, v_page, v_token, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    EDGE_N: tl.constexpr, STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys first..end, queries at positions lowest..highest -> maximum, sum, weighted values.

    Keys that every query sees are read in blocks of BLOCK_N, masked ones in blocks of EDGE_N.
    """
    m = tl.full([q.shape[0]], M_INIT, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    low, bottom = first, 0
    if WINDOW > 0:
        bottom = tl.maximum(lowest + 1 - WINDOW, 0)
        low = tl.maximum(highest - WINDOW + BLOCK_N, first) // BLOCK_N * BLOCK_N
    high = tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, end)
    if high <= low:  # one loop only: each fills a pipeline
        low, high = first, first
    if WINDOW > 0:
        m, total, acc = _attend_blocks(
            q, m, total, acc, K, V, table, first, low, bottom, end, position,
            k_page, k_token, v_page, v_token, scale, softcap,
            D, BLOCK_D, PAGE, EDGE_N, STAGES, SAME_STRIDES, WINDOW, SOFTCAP, PRECISION, True,
        )  # fmt: skip
    m, total, acc = _attend_blocks(
        q, m, total, acc, K, V, table, low, high, bottom, end, position,
        k_page, k_token, v_page, v_token, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_N, STAGES, SAME_STRIDES, WINDOW, SOFTCAP, PRECISION, False,
    )  # fmt: skip
    return _attend_blocks(
        q, m, total, acc, K, V, table, high, end, bottom, end, position,
        k_page, k_token, v_page, v_token, scale, softcap,
        D, BLOCK_D, PAGE, EDGE_N, STAGES, SAME_STRIDES, WINDOW, SOFTCAP, PRECISION, True,
    )  # fmt: skip


@triton.jit
def _tile(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, ITEMS, index,
    head, q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_N: tl.constexpr,
    STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    item = ITEMS + index * 8
    row, tile = tl.load(item), tl.load(item + 1)
    first, end = tl.load(item + 2), tl.load(item + 3)
    q_start, q_len = tl.load(item + 4), tl.load(item + 5)
    kv_len, partial = tl.load(item + 6), tl.load(item + 7)
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real = r < q_len * GROUP
    inside = real[:, None] & (d < D)[None, :]
    token = (q_start + r // GROUP).to(tl.int64)
    heads = head * GROUP + r % GROUP
    q_at = Q + (token * q_token + heads * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    if K_SCALE is not None:
        scale = scale * tl.load(K_SCALE + head)

    before = kv_len - q_len  # the position of the row's first query
    m, total, acc = _softmax(
        q, K + head.to(tl.int64) * k_head, V + head.to(tl.int64) * v_head,
        TABLE + row.to(tl.int64) * table_row, first, end, before + r // GROUP,
        before + tile * BLOCK_M // GROUP, before + (tile * BLOCK_M + (BLOCK_M - 1)) // GROUP,
        k_page, k_token, v_page, v_token, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_N, EDGE_N, STAGES, SAME_STRIDES, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip

    if V_SCALE is not None:
        acc = acc * tl.load(V_SCALE + head)
    if partial:
        slot = (index * KV_HEADS + head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        safe_total = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(safe_total))
        partial_at = PARTIAL_OUT + slot[:, None] * D + d[None, :]
        tl.store(partial_at, acc / safe_total[:, None], mask=inside)
        tl.store(PARTIAL_LSE + slot, lse, mask=real)
    else:
        factor, lse = finish(m, total, SINKS, heads, real)
        out_at = OUT + (token * out_token + heads * out_head)[:, None] + d[None, :]
        tl.store(out_at, (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside)
        if LSE is not None:
            tl.store(LSE + token * lse_token + heads, lse, mask=real)


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    ITEMS, COUNTS, QUEUE,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_N: tl.constexpr,
    STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    work = tl.load(COUNTS) * KV_HEADS
    w = tl.atomic_add(QUEUE, 1, sem="relaxed")
    while w < work:
        _tile(
            Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
            ITEMS, w // KV_HEADS, w % KV_HEADS,
            q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
            out_token, out_head, lse_token, scale, softcap, KV_HEADS, GROUP, BLOCK_M, D, BLOCK_D,
            PAGE, BLOCK_N, EDGE_N, STAGES, SAME_STRIDES, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        w = tl.atomic_add(QUEUE, 1, sem="relaxed")
    if w == work + tl.num_programs(0) - 1:  # each program takes one number past the end
        tl.store(QUEUE, 0)  # the last one resets the queue for the next layer


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes, which the tile plan must match, and compile options."""

    block_m: int
    block_n: int
    edge_n: int  # keys of a masked block, of which block_n is a multiple
    warps: int
    stages: int
    ctas_per_sm: int = 1
    registers: int | None = None  # per thread at most, so that ctas_per_sm CTAs fit


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The configuration for q of this type, by measurement on an H100."""
    if dtype == torch.float32:
        return PrefillConfig(block_m=64, block_n=32, edge_n=32, warps=8, stages=1)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=32, edge_n=32, warps=8, stages=3)
    if head_dim > 64:
        return PrefillConfig(block_m=128, block_n=128, edge_n=32, warps=8, stages=3)
    return PrefillConfig(
        block_m=128, block_n=64, edge_n=32, warps=8, stages=3, ctas_per_sm=2, registers=128
    )


def prefill(inputs: KernelInputs, tiles: TilePlan, *, config: PrefillConfig | None = None) -> None:
    """Attention of the tile plan's rows: those with q_len of at least spec.min_q_len.

    Query i of a row sees keys up to its position kv_len - q_len + i, within tiles.spec.window.
    Source: FlashAttention-2.
    """
    q, k, v, spec = inputs.q, inputs.k, inputs.v, tiles.spec
    head_dim, kv_heads, page = q.shape[-1], k.shape[1], k.shape[2]
    assert (kv_heads, kv_heads * spec.group) == (spec.kv_heads, q.shape[1]), "plan of other heads"
    assert tiles.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    config = config or prefill_config(head_dim, q.dtype)
    assert spec.block_n % config.edge_n == 0, "the plan is for other tiles"
    _prefill[(spec.programs,)](
        q, k, v, inputs.page_table, tiles.partial_out, tiles.partial_lse, inputs.out, inputs.lse,
        inputs.sinks, inputs.k_scale, inputs.v_scale, tiles.items, tiles.counts, tiles.queue,
        *inputs.strides(), inputs.scale, inputs.softcap,
        KV_HEADS=kv_heads, GROUP=spec.group, BLOCK_M=spec.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), PAGE=page, BLOCK_N=spec.block_n,
        EDGE_N=config.edge_n, STAGES=config.stages, SAME_STRIDES=k.stride() == v.stride(),
        WINDOW=spec.window, SOFTCAP=inputs.softcap > 0, PRECISION=inputs.precision,
        num_warps=config.warps, maxnreg=config.registers, **dependent_launch(q.device),
    )  # fmt: skip
    merge_tiles(tiles, inputs)
