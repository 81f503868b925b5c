"""Split-KV decode attention (Flash-Decoding) over paged KV, with the work tiles of a plan.

decode: rows of few queries against their pages.
  grid      fixed (plan.spec.programs), so that a graph can replay any batch; a program runs its
            work tiles of plan.work, or takes them from the queue
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            nothing past a row's length and nothing before its window
  writes    out [T, heads, D] and lse [T, heads] of rows that are not split; for work tiles of
            split rows partial_out [queries, D] float32, normalized, and partial_lse [queries] in
            base 2
  math      the group's heads and the row's queries are packed into one tile of BLOCK_Q (GQA), so
            that K and V are read once; online softmax in base 2, float32 accumulation
  bound     memory: 2 * kv_len * D * bytes per KV head
  checked   tests/attention/decode/test_decode_kernel.py against a float64 oracle
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, dot, finish, to_logits
from attention.decode.combine import combine
from attention.planner.split_plan import SplitPlan


@triton.jit
def _read_work_tile(item):
    """-> row, head, first, end, q_start, q_len, kv_len, partial: an entry of `work`."""
    row, head, first, end = (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
    )  # fmt: skip
    q_start, q_len, kv_len, partial = (
        tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7),
    )  # fmt: skip
    return row, head, first, end, q_start, q_len, kv_len, partial


@triton.jit
def _seen(valid, key, position, SEVERAL: tl.constexpr, WINDOW: tl.constexpr):
    """[BLOCK_Q, BLOCK_N]: which keys each query sees.  SEVERAL: rows may have q_len > 1."""
    seen = valid[None, :]
    if SEVERAL:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def _store(
    acc, m, total, w, partial, token, heads, r, d, real, inside, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE,
    SINKS, out_token, out_head, lse_token, QUERIES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store a work tile's result: as a partial result for `combine`, or as the row's output."""
    if partial:
        slot = w.to(tl.int64) * QUERIES + r
        safe_total = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(safe_total))
        tl.store(
            PARTIAL_OUT + slot[:, None] * D + d[None, :], acc * (1.0 / safe_total)[:, None],
            mask=inside,
        )  # fmt: skip
        tl.store(PARTIAL_LSE + slot, lse, mask=real)
    else:
        factor, lse = finish(m, total, SINKS, heads, real)
        tl.store(
            OUT + (token * out_token + heads * out_head)[:, None] + d[None, :],
            (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside,
        )  # fmt: skip
        if LSE is not None:
            tl.store(LSE + token * lse_token + heads, lse, mask=real)


@triton.jit
def _work_tile(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, WORK, w,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_Q: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, first, end, q_start, q_len, kv_len, partial = _read_work_tile(WORK + w * 8)
    r = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    real = r < q_len * GROUP
    inside = real[:, None] & (d < D)[None, :]
    token = (q_start + r // GROUP).to(tl.int64)
    heads = head * GROUP + r % GROUP
    q = tl.load(
        Q + (token * q_token + heads * q_head)[:, None] + d[None, :], mask=inside, other=0.0
    )
    if K_SCALE is not None:
        scale = scale * tl.load(K_SCALE + head)
    position = kv_len - q_len + r // GROUP
    lowest = kv_len - q_len + 1 - WINDOW  # the first key that any query sees

    m = tl.full([BLOCK_Q], M_INIT, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    table = TABLE + row.to(tl.int64) * table_row
    k_head_base = K + head.to(tl.int64) * k_head
    v_head_base = V + head.to(tl.int64) * v_head
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        valid = key < end
        if WINDOW > 0:
            valid = valid & (key >= lowest)
        page = tl.load(table + key // PAGE, mask=valid, other=0).to(tl.int64)
        mask = valid[:, None]
        if BLOCK_D != D:
            mask = mask & (d < D)[None, :]
        cell = key % PAGE
        k_at = k_head_base + (page * k_page + cell * k_token)[:, None] + d[None, :]
        k = tl.load(k_at, mask=mask, other=0.0).to(q.dtype)
        s = dot(q, tl.trans(k), None, PRECISION)
        seen = _seen(valid, key, position, QUERIES > GROUP, WINDOW)
        s = tl.where(seen, to_logits(s, scale, softcap, SOFTCAP), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        v_at = v_head_base + (page * v_page + cell * v_token)[:, None] + d[None, :]
        v = tl.load(v_at, mask=mask, other=0.0).to(q.dtype)
        acc = dot(p.to(q.dtype), v, acc * alpha[:, None], PRECISION)

    if V_SCALE is not None:
        acc = acc * tl.load(V_SCALE + head)
    _store(
        acc, m, total, w, partial, token, heads, r, d, real, inside, PARTIAL_OUT, PARTIAL_LSE, OUT,
        LSE, SINKS, out_token, out_head, lse_token, QUERIES, D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    WORK, STARTS, QUEUE,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, scale, softcap,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_Q: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, QUEUED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    w = tl.load(STARTS + program)
    stop = tl.load(STARTS + program + 1)
    if DEPENDENT:
        wait_for_launcher()
    if QUEUED:  # stop is the number of work tiles
        w = tl.atomic_add(QUEUE, 1)
    while w < stop:
        _work_tile(
            Q, K, V, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE, WORK, w,
            q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
            out_token, out_head, lse_token, scale, softcap,
            GROUP, QUERIES, BLOCK_Q, D, BLOCK_D, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        if QUEUED:
            w = tl.atomic_add(QUEUE, 1)
        else:
            w += 1


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile size and compile options; `ctas_per_sm` is measured, not only what fits."""

    block_n: int
    stages: int
    warps: int
    ctas_per_sm: int


def decode_config(
    head_dim: int, dtype: torch.dtype, queries: int, kv_dtype: torch.dtype | None = None
) -> DecodeConfig:
    """The configuration for tiles of `queries` packed rows, by measurement on an H100.

    kv_dtype: of the pages; None: dtype
    """
    if dtype == torch.float32 or head_dim > 128 or queries > 16:
        return DecodeConfig(block_n=32, stages=3, warps=4, ctas_per_sm=1)
    # The conversion from float8 takes registers.
    return DecodeConfig(
        block_n=64, stages=3, warps=4, ctas_per_sm=3 if kv_dtype in (None, dtype) else 2
    )


MAX_QUERIES, MAX_TILE = 128, 128 * 128  # rows and elements of a tile that fit in registers


def most_queries(head_dim: int) -> int:
    """Packed rows of the largest tile."""
    return min(MAX_QUERIES, MAX_TILE >> (head_dim - 1).bit_length())


def _tile(group: int, max_q_len: int, head_dim: int) -> tuple[int, int]:
    """(BLOCK_Q, BLOCK_D); raises ValueError if a row's packed queries are more than one tile."""
    block_d = triton.next_power_of_2(head_dim)
    queries, most = group * max_q_len, most_queries(head_dim)
    if queries > most:
        raise ValueError(
            f"{group} query heads x max_q_len {max_q_len} = {queries} queries a KV head: the "
            f"decode kernel serves {most} of head_dim {head_dim}: plan with a smaller max_q_len, "
            "and leave longer rows to the prefill kernel"
        )
    return max(16, triton.next_power_of_2(queries)), block_d


def decode(inputs: KernelInputs, plan: SplitPlan, *, config: DecodeConfig | None = None) -> None:
    """Attention of the plan's rows: those with q_len up to plan.spec.max_q_len.

    Query i of a row sees keys up to its position kv_len - q_len + i, within plan.spec.window.
    Raises ValueError if a row's packed queries exceed one tile.
    Source: Flash-Decoding; FlashAttention-2.
    """
    q, k, v, spec = inputs.q, inputs.k, inputs.v, plan.spec
    head_dim, kv_heads, page = q.shape[-1], k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    queries = group * spec.max_q_len
    assert spec.kv_heads == kv_heads, "the plan is for other heads"
    assert plan.partial_out.shape[1:] == (queries, head_dim), "the plan is for other shapes"
    config = config or decode_config(head_dim, q.dtype, queries, k.dtype)
    block_q, block_d = _tile(group, spec.max_q_len, head_dim)
    _decode[(spec.programs,)](
        q, k, v, inputs.page_table, plan.partial_out, plan.partial_lse, inputs.out, inputs.lse,
        inputs.sinks, inputs.k_scale, inputs.v_scale, plan.work, plan.starts, plan.queue,
        *inputs.strides(), inputs.scale, inputs.softcap,
        GROUP=group, QUERIES=queries, BLOCK_Q=block_q, D=head_dim, BLOCK_D=block_d,
        PAGE=page, BLOCK_N=config.block_n, STAGES=config.stages,
        WINDOW=spec.window, SOFTCAP=inputs.softcap > 0, PRECISION=inputs.precision,
        QUEUED=plan.queued, num_warps=config.warps, **dependent_launch(q.device),
    )  # fmt: skip
    combine(plan, inputs)
