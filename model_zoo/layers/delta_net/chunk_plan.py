# plan_chunks: which rows of a step are the prompt kernels', and the chunks of their tokens.
#   grid      (B): a program lists a row
#   reads     cu_seqlens [B + 1], cache_seqlens [B] int32
#   writes    a ChunkPlan.  Chunks end where the position in the sequence divides by CHUNK, so that
#             a prompt which is cut there is computed with the same bits as one that is not
#   order     rows, and chunks of a row, are listed in order: each program counts all rows before
#   launch    without PDL, since kernels read plans before they wait
#   bound     latency: once a step
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_zoo.layers.delta_net.inputs import CHUNK, MAX_DECODE_TOKENS, ChunkPlan

LEAST_BLOCK = 256  # rows that a program reads at once: one kernel for all smaller steps


@triton.jit(do_not_specialize=["num_rows"])
def _plan_chunks(
    CU_SEQLENS, LENGTHS, ROWS, FIRST_CHUNKS, CHUNKS, COUNTS, num_rows,
    MAX_TOKENS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    begins = tl.load(CU_SEQLENS + other, mask=other < num_rows, other=0)
    tokens = tl.load(CU_SEQLENS + other + 1, mask=other < num_rows, other=0) - begins
    start = tl.load(LENGTHS + other, mask=other < num_rows, other=0) - tokens
    is_prompt = (tokens > MAX_TOKENS).to(tl.int32)
    chunks = is_prompt * ((start % CHUNK + tokens + CHUNK - 1) // CHUNK)
    if row == 0:
        tl.store(COUNTS, tl.sum(is_prompt, 0))
        tl.store(COUNTS + 1, tl.sum(chunks, 0))
    count = tl.sum(tl.where(other == row, chunks, 0), 0)
    if count > 0:
        index = tl.sum(tl.where(other < row, is_prompt, 0), 0)
        tl.store(ROWS + index, row)
        at = tl.sum(tl.where(other < row, chunks, 0), 0)
        tl.store(FIRST_CHUNKS + index, at)
        begin = tl.load(CU_SEQLENS + row)
        end = tl.load(CU_SEQLENS + row + 1)
        base = begin - (tl.load(LENGTHS + row) - (end - begin)) % CHUNK
        for first in range(0, count, BLOCK):
            chunk = first + other
            entry = CHUNKS + (at + chunk) * 3
            mask = chunk < count
            tl.store(entry, tl.zeros_like(chunk) + row, mask=mask)
            tl.store(entry + 1, tl.maximum(base + chunk * CHUNK, begin), mask=mask)
            tl.store(entry + 2, tl.minimum(base + (chunk + 1) * CHUNK, end), mask=mask)


@triton.jit
def chunk_of(CHUNKS, CU_SEQLENS, LENGTHS, SLOTS, CONV, index, conv_slot):
    """-> (first token, one past the last; the row's first token, and its position in the sequence;
    whether the row has a slot; the slot's inputs of the convolution)."""
    entry = CHUNKS + index * 3
    row, first, last = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    begin = tl.load(CU_SEQLENS + row)
    start = tl.load(LENGTHS + row) - (tl.load(CU_SEQLENS + row + 1) - begin)
    slot = tl.load(SLOTS + row).to(tl.int64)
    return first, last, begin, start, slot >= 0, CONV + slot * conv_slot


def plan_chunks(cu_seqlens: Tensor, cache_seqlens: Tensor, num_tokens: int) -> ChunkPlan:
    """The plan of B rows with num_tokens tokens at most, once a step for all layers.

    cu_seqlens [B + 1], cache_seqlens [B] int32, as in DeltaNetRows.  The host reads nothing.
    """
    num_rows = len(cache_seqlens)
    block = max(LEAST_BLOCK, triton.next_power_of_2(num_rows))
    most_rows = min(num_rows, num_tokens // (MAX_DECODE_TOKENS + 1))
    most_chunks = num_tokens // CHUNK + 2 * most_rows  # the first and the last may be short
    new = {"dtype": torch.int32, "device": cu_seqlens.device}
    plan = ChunkPlan(
        rows=torch.empty(most_rows, **new),
        first_chunks=torch.empty(most_rows, **new),
        chunks=torch.empty(most_chunks, 3, **new),
        counts=torch.empty(2, **new),
    )
    _plan_chunks[(num_rows,)](
        cu_seqlens, cache_seqlens, plan.rows, plan.first_chunks, plan.chunks, plan.counts, num_rows,
        MAX_TOKENS=MAX_DECODE_TOKENS, CHUNK=CHUNK, BLOCK=block,
    )  # fmt: skip
    return plan
