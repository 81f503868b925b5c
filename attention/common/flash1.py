"""FlashAttention-1's form: one program per query and head, for prefill and decode.

flash1: the baseline of the other kernels, correct on every shape and slow.
  grid      T * heads programs, those of a group's heads adjacent so that they share K and V in the
            L2 cache; padding tokens of a captured graph exit at once
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            cu_seqlens_q [B + 1] and cache_seqlens [B] int32: each program finds its row there
  writes    out [T, heads, D], lse [T, heads] float32
  math      online softmax in base 2, rescaled with every tile; q k^T and p v are float32
            reductions, as there is one query only.  The tile size is fixed: no shared memory or
            register allocation depends on a length
  bound     memory: every query reads its row's whole K and V
  checked   tests/attention/common/test_flash1.py against a float64 oracle
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, finish, to_logits

TILE = 32768  # elements of K in a tile: 256 keys of head_dim 128


@triton.jit
def _row_of(token, CU_SEQLENS_Q, rows):
    """The token's row: the last one that begins at or before the token."""
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(CU_SEQLENS_Q + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["rows", "table_row"])
def _flash1(
    Q, K, V, TABLE, CU_SEQLENS_Q, CACHE_SEQLENS, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    q_token, q_head, table_row, k_page, k_head, k_token, v_page, v_head, v_token,
    out_token, out_head, lse_token, rows, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if token >= tl.load(CU_SEQLENS_Q + rows):
        return
    row = _row_of(token, CU_SEQLENS_Q, rows)
    position = tl.load(CACHE_SEQLENS + row) - tl.load(CU_SEQLENS_Q + row + 1) + token
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    token = token.to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = tl.load(Q + token * q_token + head * q_head + d, mask=d < D, other=0.0).to(tl.float32)
    if K_SCALE is not None:
        scale = scale * tl.load(K_SCALE + kv_head)

    m = M_INIT
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    table = TABLE + row.to(tl.int64) * table_row
    for start in range(first, position + 1, BLOCK_N):
        key = start + n
        valid = key <= position
        page = tl.load(table + key // PAGE, mask=valid, other=0).to(tl.int64)
        mask = valid[:, None] & (d < D)[None, :]
        at = K + kv_head * k_head + (page * k_page + key % PAGE * k_token)[:, None] + d[None, :]
        k = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        s = to_logits(tl.sum(k * q[None, :], 1), scale, softcap, SOFTCAP)
        s = tl.where(valid, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new)
        alpha = tl.exp2(m - m_new)
        at = V + kv_head * v_head + (page * v_page + key % PAGE * v_token)[:, None] + d[None, :]
        v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total = total * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(v * p[:, None], 0)
        m = m_new

    if V_SCALE is not None:
        acc = acc * tl.load(V_SCALE + kv_head)
    factor, lse = finish(m, total, SINKS, head, True)
    out = (acc * factor).to(OUT.dtype.element_ty)
    tl.store(OUT + token * out_token + head * out_head + d, out, mask=d < D)
    if LSE is not None:
        tl.store(LSE + token * lse_token + head, lse)


def flash1(
    inputs: KernelInputs, cu_seqlens_q: Tensor, cache_seqlens: Tensor, *, window: int = 0
) -> None:
    """Attention of every row, with any q_len; D at most 256.

    cu_seqlens_q  [B + 1] int32, cache_seqlens [B] int32: the rows' tokens and KV lengths; tokens
                  past cu_seqlens_q[B] are left as they are
    window        sliding window in positions; 0: full attention

    Query i of row b sees keys up to its position cache_seqlens[b] - q_len[b] + i.
    Source: FlashAttention (2022), algorithm 1, a query at a time.
    """
    q, k, v, k_scale, v_scale = inputs.q, inputs.k, inputs.v, inputs.k_scale, inputs.v_scale
    (num_tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    assert cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous() and cache_seqlens.is_contiguous()
    assert len(cu_seqlens_q) == len(cache_seqlens) + 1
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    _flash1[(num_tokens * heads,)](
        q, k, v, inputs.page_table, cu_seqlens_q, cache_seqlens, inputs.out, inputs.lse,
        inputs.sinks, k_scale, v_scale, *inputs.strides(), len(cache_seqlens), inputs.scale,
        inputs.softcap,
        HEADS=heads, GROUP=heads // kv_heads, D=head_dim, BLOCK_D=block_d, PAGE=k.shape[2],
        BLOCK_N=TILE // block_d, WINDOW=window, SOFTCAP=inputs.softcap > 0, num_warps=16,
    )  # fmt: skip
