"""The jitted parts that kernels of sums over ranks share: sending rows, and adding what comes.

send_row     writes a row into the memory of all other ranks
sum_of_row   waits for a row of all others, adds it, and says in its memory that nothing has come

-0.0 in the receiver's memory says that a number has not come, so that data and signal are one store
(TensorRT-LLM calls this the Lamport protocol).  A buffer that a call has read is written again two
calls later: a rank that is there has received this rank's rows of the call between, which were sent
after this call was complete.  So two buffers suffice, which calls use in turns.  Sums of embeddings
have a third one, so that each step can begin with the first of the two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from attention.common.softmax import INTERPRETED
from model_zoo.layers.kernels.add_rms_norm import rms_norm


@triton.jit
def negative_zeros(x):
    """-0.0 in the shape and type of x."""
    if x.dtype.primitive_bitwidth == 16:
        return tl.full(x.shape, -32768, tl.int16).to(x.dtype, bitcast=True)
    else:
        return tl.full(x.shape, -2147483648, tl.int32).to(x.dtype, bitcast=True)


@triton.jit
def is_negative_zero(x):
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True) == -32768
    else:
        return x.to(tl.int32, bitcast=True) == -2147483648


@triton.jit
def part_of_row(PART, row, part_row, column, mask):
    """A row of this rank's part, with 0.0 for -0.0: all ranks add the same numbers."""
    part = tl.load(PART + row * part_row + column, mask=mask, other=0.0)
    return tl.where(is_negative_zero(part), 0.0, part).to(part.dtype)


@triton.jit
def row_of(MEMORY, dtype: tl.constexpr, sender: tl.constexpr, receiver: tl.constexpr, turn_at,
           slot, row, N: tl.constexpr):  # fmt: skip
    """Where `receiver`, whose memory is at an address MEMORY, gets a row of `sender`."""
    index: tl.constexpr = sender - (1 if sender > receiver else 0)
    at = MEMORY.to(tl.pointer_type(dtype)) + turn_at + index * slot + row * N
    return tl.multiple_of(at, 16)  # bytes; of an address the compiler cannot know it


@triton.jit
def send_row(
    PART, MEMORIES, turn_at, slot, row, count, part_row, column, mask, RANK: tl.constexpr,
    WORLD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write a row into the memory of all other ranks, if it is one of `count`."""
    dtype: tl.constexpr = PART.dtype.element_ty
    if row < count:
        part = part_of_row(PART, row, part_row, column, mask)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                at = row_of(MEMORIES[rank], dtype, RANK, rank, turn_at, slot, row, N)
                tl.store(at + column, part, mask=mask)


@triton.jit
def now():
    """Microseconds; interpreted kernels have no clock, and count polls."""
    if INTERPRETED:
        return tl.full((), 0, tl.int64)
    else:
        return cuda.globaltimer() // 1000


@triton.jit
def is_over(waits, began, polls, LIMIT):
    """Whether a program that waits has come to the limit, or any other has."""
    limit = tl.load(LIMIT).to(tl.int64)
    over = waits & (limit > 0)
    if over:
        waited = polls if INTERPRETED else now() - began
        # Threads read the clock at different times: that of one decides for all.
        over = tl.atomic_max(LIMIT + 1, (waited > limit).to(tl.int32)) != 0
    return over


@triton.jit
def receive(at, LIMIT, mask):
    """Numbers of another rank once all have come, or, if LIMIT says so, what is there."""
    x = tl.load(at, mask=mask, other=0.0, volatile=True)
    waits = tl.max(is_negative_zero(x).to(tl.int32), 0) != 0
    if waits:
        began, polls = now(), tl.full((), 0, tl.int64)
        while waits:
            x = tl.load(at, mask=mask, other=0.0, volatile=True)
            waits = tl.max(is_negative_zero(x).to(tl.int32), 0) != 0
            polls += 1
            waits = waits & (is_over(waits, began, polls, LIMIT) == 0)
    return x


@triton.jit
def sum_of_row(
    PART, MEMORIES, LIMIT, RESIDUAL, post_weight, eps, row, turn_at, slot, part_row, residual_row,
    column, mask, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """The residual + all parts of a row, or + the norm of their sum; stored in the residual."""
    dtype: tl.constexpr = PART.dtype.element_ty
    residual_at = RESIDUAL + row * residual_row + column
    total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    own = part_of_row(PART, row, part_row, column, mask)
    parts = tl.zeros([column.shape[0]], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            parts += own.to(tl.float32)
        else:
            at = row_of(MEMORIES[RANK], dtype, rank, RANK, turn_at, slot, row, N) + column
            part = receive(at, LIMIT, mask)
            parts += part.to(tl.float32)
            tl.store(at, negative_zeros(part), mask=mask)
    if post_weight is not None:
        parts = rms_norm(parts.to(dtype), post_weight, eps, N, PLUS_ONE).to(tl.float32)
    total = (total + parts).to(dtype)
    tl.store(residual_at, total, mask=mask)
    return total
