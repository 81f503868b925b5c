"""What the planner kernels share: checks and loads of lengths, stores of plan entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def check_lengths(cu_seqlens_q: Tensor, cache_seqlens: Tensor, max_rows: int, planner: str) -> int:
    """The number of rows B of cu_seqlens_q [B + 1] and cache_seqlens [B], int32 on the device.

    Raises ValueError if B exceeds max_rows; planner: its name in the message.
    """
    num_rows = len(cache_seqlens)
    assert len(cu_seqlens_q) == num_rows + 1
    assert cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous() and cache_seqlens.is_contiguous()
    if num_rows > max_rows:
        raise ValueError(
            f"a step of {num_rows} rows is over the {planner} planner's max_rows={max_rows}: "
            "make the planner for more rows"
        )
    return num_rows


@triton.jit
def read_queries(CU_SEQLENS_Q, row, mask):
    """-> (q_start, q_len)"""
    q_start = tl.load(CU_SEQLENS_Q + row, mask=mask, other=0)
    return q_start, tl.load(CU_SEQLENS_Q + row + 1, mask=mask, other=0) - q_start


@triton.jit
def read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, mask):
    """-> (q_start, q_len, kv_len)"""
    q_start, q_len = read_queries(CU_SEQLENS_Q, row, mask)
    return q_start, q_len, tl.load(CACHE_SEQLENS + row, mask=mask, other=0)


@triton.jit
def block_range(q_len, kv_len, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
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
    """-> (planned, q_start, q_len, kv_len, first_block, blocks) as `planned_rows`.

    Rows that are not planned have 0 blocks.
    """
    q_start, q_len, kv_len = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, mask)
    planned = (q_len >= 1) & (q_len <= MAX_Q_LEN)
    first, blocks = block_range(q_len, kv_len, WINDOW, BLOCK)
    return planned, q_start, q_len, kv_len, first, tl.where(planned, blocks, 0)


@triton.jit
def write_work_tiles(
    WORK, index, row, head, first, end, q_start, q_len, kv_len, first_block, blocks, mask,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """WORK[index] = the work tile of blocks first..end of a row and head, as `work_tiles_of`."""
    first_token = (first_block + first) * BLOCK
    end_token = tl.minimum((first_block + end) * BLOCK, kv_len)
    partial = (end - first < blocks).to(tl.int32)
    write_entry(
        WORK, index, row, head, first_token, end_token, q_start, q_len, kv_len, partial, mask
    )


@triton.jit
def write_entry(ENTRIES, index, a, b, c, d, e, f, g, h, mask):
    """ENTRIES[index] = eight int32, two per store."""
    entry = ENTRIES.to(tl.pointer_type(tl.int64)) + index.to(tl.int64) * 4
    tl.store(entry, pair_of(a, b), mask=mask)
    tl.store(entry + 1, pair_of(c, d), mask=mask)
    tl.store(entry + 2, pair_of(e, f), mask=mask)
    tl.store(entry + 3, pair_of(g, h), mask=mask)


@triton.jit
def pair_of(low, high):
    """Two int32 packed into one int64, `low` at the lower address."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
