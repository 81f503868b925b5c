"""Attention of packed sequences without a mask: FlashAttention-2 in plain Triton.

varlen
  grid      (blocks of queries of the longest sequence, heads, sequences); a program whose block is
            past the end of its sequence ends at once
  reads     qkv [T, 3, heads, D] bf16, fp16 or fp32, rows at any stride; cu_seqlens [B + 1] int32;
            of a program's keys and values nothing outside of its sequence
  writes    out [T, heads, D]
  math      online softmax in base 2, float32 sums; only the last block of keys is masked
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  checked   tests/attention/encoder/test_varlen.py against a float64 oracle

Heads have 64, 72 or 80 values.  Tiles have powers of two columns: a head of 72 or 80 is one of 64
and a rest of 16, two products for the scores and two for the values, in place of one of 128
columns.  For Hopper ptxas 12.8 compiles the rest wrongly in half precision, where few keys are left
(docs/lab/image-encoder.md); varlen_hopper.py serves these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.softmax import LOG2E, M_INIT, dot
from attention.encoder.seqlens import Seqlens

COLUMNS = 64  # of the first product
REST = 16  # of the second one: the least that tensor cores multiply


@triton.jit
def _load(
    base, row, row_stride, end, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """The columns FIRST .. FIRST + BLOCK_D of some rows; those past D, or past end, are zeros."""
    column = FIRST + tl.arange(0, BLOCK_D)
    at = base + row[:, None] * row_stride + column[None, :]
    if EDGE:
        tile = tl.load(at, mask=(row < end)[:, None] & (column < D)[None, :], other=0.0)
    elif FIRST + BLOCK_D > D:
        tile = tl.load(at, mask=(column < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _attend_blocks(
    q, q_rest, m, total, acc, acc_rest, K, V, row_stride, start, stop, end, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The inner loop over keys start .. stop; without EDGE all of them are before `end`."""
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        k = _load(K, key, row_stride, end, D, BLOCK_D, 0, EDGE)
        s = dot(q, tl.trans(k), None, PRECISION)
        if REST > 0:
            k_rest = _load(K, key, row_stride, end, D, REST, BLOCK_D, EDGE)
            s = dot(q_rest, tl.trans(k_rest), s, PRECISION)
        if EDGE:
            s = tl.where((key < end)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - m_new[:, None])  # one fused multiply-add per element
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        weights = p.to(q.dtype)
        v = _load(V, key, row_stride, end, D, BLOCK_D, 0, EDGE)
        acc = dot(weights, v, acc * alpha[:, None], PRECISION)
        if REST > 0:
            v_rest = _load(V, key, row_stride, end, D, REST, BLOCK_D, EDGE)
            acc_rest = dot(weights, v_rest, acc_rest * alpha[:, None], PRECISION)
    return m, total, acc, acc_rest


@triton.jit
def _store(
    OUT, result, row, row_stride, end, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr
):
    column = FIRST + tl.arange(0, BLOCK_D)
    mask = (row < end)[:, None] & (column < D)[None, :]
    tl.store(
        OUT + row[:, None] * row_stride + column[None, :], result.to(OUT.dtype.element_ty), mask
    )


@triton.jit
def _varlen(
    QKV, OUT, CU_SEQLENS, row_stride, factor, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin = tl.load(CU_SEQLENS + sequence)
    end = tl.load(CU_SEQLENS + sequence + 1) - begin
    if tl.program_id(0) * BLOCK_M >= end:
        return
    # Rows count from the sequence's first one.
    Q = QKV + begin.to(tl.int64) * row_stride + head * D
    K, V = Q + HEADS * D, Q + 2 * HEADS * D
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(Q, row, row_stride, end, D, BLOCK_D, 0, True)
    q_rest = q
    m = tl.full([BLOCK_M], M_INIT, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_rest = total
    if REST > 0:
        q_rest = _load(Q, row, row_stride, end, D, REST, BLOCK_D, True)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    whole = end // BLOCK_N * BLOCK_N
    m, total, acc, acc_rest = _attend_blocks(
        q, q_rest, m, total, acc, acc_rest, K, V, row_stride, 0, whole, end, factor,
        D, BLOCK_D, REST, BLOCK_N, STAGES, PRECISION, False,
    )  # fmt: skip
    m, total, acc, acc_rest = _attend_blocks(
        q, q_rest, m, total, acc, acc_rest, K, V, row_stride, whole, end, end, factor,
        D, BLOCK_D, REST, BLOCK_N, 1, PRECISION, True,
    )  # fmt: skip
    share = (1.0 / total)[:, None]
    out = OUT + (begin.to(tl.int64) * HEADS + head) * D
    _store(out, acc * share, row, HEADS * D, end, D, BLOCK_D, 0)
    if REST > 0:
        _store(out, acc_rest * share, row, HEADS * D, end, D, REST, BLOCK_D)


@dataclass(frozen=True, slots=True)
class VarlenConfig:
    block_m: int
    block_n: int
    warps: int
    stages: int


def varlen_config(dtype: torch.dtype) -> VarlenConfig:
    """Tiles as those of prefill.py: float32 is multiplied without tensor cores."""
    if dtype == torch.float32:
        return VarlenConfig(block_m=64, block_n=32, warps=8, stages=1)
    return VarlenConfig(block_m=128, block_n=64, warps=8, stages=3)


def varlen(qkv: Tensor, seqlens: Seqlens, *, config: VarlenConfig | None = None) -> Tensor:
    """See above: qkv [T, 3, heads, D] -> out [T, heads, D]."""
    count, three, heads, head_dim = qkv.shape
    assert three == 3 and COLUMNS <= head_dim <= COLUMNS + REST
    assert qkv.stride()[1:] == (heads * head_dim, head_dim, 1)
    config = config or varlen_config(qkv.dtype)
    out = torch.empty(count, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _varlen[(triton.cdiv(seqlens.longest, config.block_m), heads, len(seqlens.lens))](
        qkv, out, seqlens.cu_seqlens, qkv.stride(0), head_dim**-0.5 * LOG2E.value,
        HEADS=heads, D=head_dim, BLOCK_D=COLUMNS, REST=REST if head_dim > COLUMNS else 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32", num_warps=config.warps,
    )  # fmt: skip
    return out
