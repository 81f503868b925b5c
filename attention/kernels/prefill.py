"""Prefill attention over paged KV: FlashAttention-2, one tile of queries after the other.

prefill: the rows of a tile plan, chunks of prompts with or without cached tokens before them.
  grid      fixed (plan.spec.programs), so that a graph can replay any step; a program takes the
            next (item, KV head) from the queue, longest items first
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            of K and V nothing past the last position that a tile sees, nothing before its window
  writes    out [T, heads, D], lse [T, heads]; of tiles cut along KV partial_out [block_m, D]
            float32, normalised, and partial_lse [block_m] in base 2, for merge_tiles.py
  math      block_m packed query rows of one KV head; online softmax in base 2, float32 sums;
            blocks that every query sees whole have no masks, those at the edges have
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  checked   tests/attention/test_prefill_kernel.py against a float64 oracle

Page ids are loaded one block ahead and carried by the loop: were they loaded where they are used,
the pipeliner would spend its stages on them, and keep a single buffer for K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.merge_tiles import merge_tiles
from attention.kernels.softmax import LOG2E, NOTHING, dot, finish, to_logits
from attention.planner.tiles import TilePlan


@triton.jit
def _page_ids(table, start, bottom, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key of a block, or of all of them; 0 for keys not in bottom..end."""
    if PAGE >= BLOCK_N:
        ids = tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        ids = tl.load(table + key // PAGE, mask=(key >= bottom) & (key < end), other=0)
    return ids


@triton.jit
def _block_at(
    base, ids, start, page_stride, token_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Addresses [BLOCK_N, BLOCK_D] of a block of K or V, and which of the columns there are."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    if PAGE >= BLOCK_N:
        at = ids.to(tl.int64) * page_stride + (start % PAGE + n) * token_stride
    else:
        at = ids.to(tl.int64) * page_stride + n % PAGE * token_stride
    return base + at[:, None] + d[None, :]


@triton.jit
def _visit(
    q, m, total, acc, K, V, table, start, stop, bottom, end, position,
    k_page, k_token, v_page, v_token, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys start..stop into the softmax."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    ids = _page_ids(table, start, bottom, end, PAGE, BLOCK_N)
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        k_at = _block_at(K, ids, block, k_page, k_token, D, BLOCK_D, PAGE, BLOCK_N)
        v_at = _block_at(V, ids, block, v_page, v_token, D, BLOCK_D, PAGE, BLOCK_N)
        ids = _page_ids(table, block + BLOCK_N, bottom, end, PAGE, BLOCK_N)
        key = block + n
        if MASKED:
            there = ((key >= bottom) & (key < end))[:, None] & (d < D)[None, :]
            k = tl.load(k_at, mask=there, other=0.0)
        elif BLOCK_D != D:
            k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        s = dot(q, tl.trans(k.to(q.dtype)), None, PRECISION)
        if SOFTCAP or MASKED:
            s = to_logits(s, scale, softcap, SOFTCAP)
            if MASKED:
                seen = key[None, :] <= position[:, None]
                if WINDOW > 0:
                    seen = seen & (key[None, :] > position[:, None] - WINDOW)
                s = tl.where(seen, s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - top[:, None])
        else:  # one fused multiply-add an element
            top = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
            p = tl.exp2(s * (scale * LOG2E) - top[:, None])
        alpha = tl.exp2(m - top)
        total = total * alpha + tl.sum(p, 1)
        m = top
        if MASKED:
            v = tl.load(v_at, mask=there, other=0.0)
        elif BLOCK_D != D:
            v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], PRECISION)
    return m, total, acc


@triton.jit
def _tile(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, ITEMS, index,
    head, q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
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

    # Every query of the tile sees the keys low..high; around them are blocks with masks.
    lowest = kv_len - q_len + tile * BLOCK_M // GROUP  # position of the tile's first query
    position = kv_len - q_len + r // GROUP
    high = tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, end)
    table = TABLE + row.to(tl.int64) * table_row
    k_base, v_base = K + head.to(tl.int64) * k_head, V + head.to(tl.int64) * v_head
    m = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, bottom = first, 0
    if WINDOW > 0:
        bottom = tl.maximum(lowest + 1 - WINDOW, 0)
        highest = tl.minimum(kv_len - q_len + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, kv_len - 1)
        low = tl.maximum(highest - WINDOW + BLOCK_N, first) // BLOCK_N * BLOCK_N
        low = tl.minimum(low, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        m, total, acc = _visit(
            q, m, total, acc, k_base, v_base, table, first, low, bottom, end, position,
            k_page, k_token, v_page, v_token, scale, softcap,
            D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION, True,
        )  # fmt: skip
    m, total, acc = _visit(
        q, m, total, acc, k_base, v_base, table, low, high, bottom, end, position,
        k_page, k_token, v_page, v_token, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION, False,
    )  # fmt: skip
    m, total, acc = _visit(
        q, m, total, acc, k_base, v_base, table, tl.maximum(low, high), end, bottom, end,
        position, k_page, k_token, v_page, v_token, scale, softcap,
        D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION, True,
    )  # fmt: skip

    if V_SCALE is not None:
        acc = acc * tl.load(V_SCALE + head)
    if partial:
        slot = (index * KV_HEADS + head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        some = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(some))
        tl.store(PARTIAL_OUT + slot[:, None] * D + d[None, :], acc / some[:, None], mask=inside)
        tl.store(PARTIAL_LSE + slot, lse, mask=real)
    else:
        factor, lse = finish(m, total, SINKS, heads, real)
        out_at = OUT + (token * out_token + heads * out_head)[:, None] + d[None, :]
        tl.store(out_at, (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside)
        if LSE is not None:
            tl.store(LSE + token * lse_token + heads, lse, mask=real)


@triton.jit
def _prefill(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    ITEMS, COUNTS, QUEUE,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    work = tl.load(COUNTS) * KV_HEADS
    w = tl.atomic_add(QUEUE, 1)
    while w < work:
        following = tl.atomic_add(QUEUE, 1)  # asked for early: the answer takes a while
        _tile(
            Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
            ITEMS, w // KV_HEADS, w % KV_HEADS,
            q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
            out_token, out_head, lse_token, scale, softcap,
            KV_HEADS, GROUP, BLOCK_M, D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        w = following
    if w == work + tl.num_programs(0) - 1:  # each program ends with one number too many
        tl.store(QUEUE, 0)  # the last of them: for the next layer


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes, which the tile plan must be made for, and how the kernel is compiled."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int = 1  # programs that fit on an SM


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The configuration for q of this type."""
    if dtype == torch.float32:
        return PrefillConfig(block_m=64, block_n=32, warps=8, stages=1)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=64, warps=8, stages=2)
    return PrefillConfig(block_m=128, block_n=128, warps=8, stages=2)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    tiles: TilePlan,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of the rows in the tile plan: those that feed at least spec.min_q_len tokens.

    q, out      [T, heads, D]; other rows of out are left as they are
    k, v        [pages, kv_heads, page, D] of one layer, of q's type or float8_e4m3fn
    page_table  [B, max_pages] int32
    lse         [T, heads] float32, natural log of the softmax sum, -inf for a query without keys
    softcap     logits become softcap * tanh(logit / softcap); 0: they stay
    sinks       [heads] float32, one more logit in each query's sum
    k_scale, v_scale  [kv_heads] float32: what stored values are multiplied with

    Query i of a row sees keys up to its position kv_len - q_len + i, and of tiles.spec.window the
    last so many.  Source: FlashAttention-2.
    """
    spec = tiles.spec
    head_dim, kv_heads, page = q.shape[-1], k.shape[1], k.shape[2]
    assert (kv_heads, kv_heads * spec.group) == (spec.kv_heads, q.shape[1]), "plan of other heads"
    assert tiles.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    config = config or prefill_config(head_dim, q.dtype)
    _prefill[(spec.programs,)](
        q, k, v, page_table, tiles.partial_out, tiles.partial_lse, out, lse, sinks,
        k_scale, v_scale, tiles.items, tiles.counts, tiles.queue,
        q.stride(0), q.stride(1), page_table.stride(0),
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), scale, softcap,
        KV_HEADS=kv_heads, GROUP=spec.group, BLOCK_M=spec.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), PAGE=page, BLOCK_N=spec.block_n,
        STAGES=config.stages, WINDOW=spec.window, SOFTCAP=softcap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=config.warps,
    )  # fmt: skip
    merge_tiles(tiles, out, lse, sinks)
