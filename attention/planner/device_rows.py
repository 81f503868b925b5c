"""What the plan kernels share: a row's lengths as `planned_rows`, a piece as `pieces_of`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_queries(CU_SEQLENS_Q, row, mask):
    """-> (q_start, q_len)"""
    q_start = tl.load(CU_SEQLENS_Q + row, mask=mask, other=0)
    return q_start, tl.load(CU_SEQLENS_Q + row + 1, mask=mask, other=0) - q_start


@triton.jit
def extent_of(q_len, kv_len, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """-> (first_block, blocks)"""
    first = tl.zeros_like(kv_len)
    if WINDOW > 0:
        first = tl.maximum(kv_len - q_len + 1 - WINDOW, 0) // BLOCK
    return first, (kv_len + (BLOCK - 1)) // BLOCK - first


@triton.jit
def read_rows(
    CU_SEQLENS_Q, CACHE_SEQLENS, row, mask,
    MAX_Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """-> (planned, q_start, q_len, kv_len, first_block, blocks) of rows; not planned: 0 blocks."""
    q_start, q_len = read_queries(CU_SEQLENS_Q, row, mask)
    kv_len = tl.load(CACHE_SEQLENS + row, mask=mask, other=0)
    planned = (q_len >= 1) & (q_len <= MAX_Q_LEN)
    first, blocks = extent_of(q_len, kv_len, WINDOW, BLOCK)
    return planned, q_start, q_len, kv_len, first, tl.where(planned, blocks, 0)


@triton.jit
def write_pieces(
    WORK, index, row, head, first, end, q_start, q_len, kv_len, first_block, blocks, mask,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """WORK[index] = blocks first..end of a row and head; two columns a store."""
    first_token = (first_block + first) * BLOCK
    end_token = tl.minimum((first_block + end) * BLOCK, kv_len)
    partial = (end - first < blocks).to(tl.int32)
    line = WORK.to(tl.pointer_type(tl.int64)) + index.to(tl.int64) * 4
    tl.store(line, pair_of(row, head), mask=mask)
    tl.store(line + 1, pair_of(first_token, end_token), mask=mask)
    tl.store(line + 2, pair_of(q_start, q_len), mask=mask)
    tl.store(line + 3, pair_of(kv_len, partial), mask=mask)


@triton.jit
def pair_of(low, high):
    """Two int32, as one int64 whose bytes are theirs in order."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
