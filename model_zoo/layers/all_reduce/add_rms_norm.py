# all_reduce_add_rms_norm: the sum of all ranks' parts, the residual sum and its RMSNorm.
#   grid      (P): program p has rows p, p + P, ...; the same P on all ranks, and all P resident
#   reads     part [T, N] of each rank at an address of BUFFERS [world] int64, bf16, fp16 or fp32;
#             residual [T, N]; weight [N]; post_weight [N] or none: of a norm of the parts' sum
#   writes    the sum into residual, its norm into out; epochs (int32) into the pads of others: word
#             [rank, p] of a rank's pad says up to which call program p of `rank` has come
#   math      parts are added in fp32 in the order of the ranks, then the residual, rounded once to
#             its type; with POST_WEIGHT the parts' sum is rounded and normed first.  The norm as in
#             add_rms_norm.  All ranks compute the same operations, and get the same bits
#   order     a rank's program p signals that its part is complete (release, system scope) and waits
#             for program p of all others (acquire).  Two calls in a row use different buffers:
#             whoever has passed the barrier of a call knows that all ranks have read the buffer
#             before it.  Epochs count on the device, so that a graph may be replayed
#   wait      without a limit, as NCCL's, or as long as the word [PITCH] of EPOCHS says: then a
#             program goes on with what is there, and says so in the word after it.  Limits are in
#             microseconds on a GPU, and in polls where the kernel is interpreted.  Once a program
#             has given up none waits for longer than a poll
#   launch    dependents are launched at once; before the wait it reads the weight
#   bound     NVLink: (world - 1) * T * N * bytes; for few rows the latency of a signal and a read
#   checked   tests/model_zoo/layers/all_reduce/
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from attention.common.softmax import INTERPRETED
from model_zoo.layers.all_reduce.symmetric_buffers import MAX_PROGRAMS, SymmetricBuffers
from model_zoo.layers.kernels.add_rms_norm import norm_warps, rms_norm


@triton.jit
def wait_for(word, epoch, LIMIT):
    """Wait until a word has come to an epoch, or, unless LIMIT is 0, until that time is over."""
    # A difference, because epochs wrap around.  Another rank may be one call ahead.
    behind = tl.atomic_add(word, 0, sem="acquire", scope="sys") - epoch < 0
    if behind:
        limit = tl.load(LIMIT).to(tl.int64)
        waited = limit - limit
        began = waited
        if not INTERPRETED:
            began = cuda.globaltimer()
        while behind:
            behind = tl.atomic_add(word, 0, sem="acquire", scope="sys") - epoch < 0
            if limit > 0:
                if INTERPRETED:
                    waited += 1
                else:
                    waited = (cuda.globaltimer() - began) // 1000
                # Threads read the clock at different times: that of one decides for all.
                is_over = (behind & (waited > limit)).to(tl.int32)
                behind = behind & (tl.atomic_max(LIMIT + 1, is_over) == 0)


@triton.jit
def barrier(PADS, EPOCHS, program, RANK: tl.constexpr, WORLD: tl.constexpr, PITCH: tl.constexpr):
    """Wait until this program of every rank has come here as often as this one."""
    epoch = tl.load(EPOCHS + program) + 1
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            pad = tl.load(PADS + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(pad + RANK * PITCH + program, epoch, sem="release", scope="sys")
    own = tl.load(PADS + RANK).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            wait_for(own + rank * PITCH + program, epoch, EPOCHS + PITCH)
    # All threads have read the old one: a thread that read the new one would wait for another call.
    tl.debug_barrier()
    tl.store(EPOCHS + program, epoch)


@triton.jit
def sum_of_row(
    BUFFERS, RESIDUAL, post_weight, eps, row, offset, residual_row, column, mask,
    WORLD: tl.constexpr, N: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """The residual + all parts of a row, or + the norm of their sum; stored in the residual."""
    dtype = RESIDUAL.dtype.element_ty
    residual_at = RESIDUAL + row * residual_row + column
    total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    parts = tl.zeros([column.shape[0]], tl.float32)
    for rank in tl.static_range(WORLD):
        part = tl.load(BUFFERS + rank).to(tl.pointer_type(dtype)) + offset + row * N
        # Of an address that is loaded the compiler cannot know it.
        part = tl.multiple_of(part, 16)
        parts += tl.load(part + column, mask=mask, other=0.0).to(tl.float32)
    if post_weight is not None:
        parts = rms_norm(parts.to(dtype), post_weight, eps, N, PLUS_ONE).to(tl.float32)
    total = (total + parts).to(dtype)
    tl.store(residual_at, total, mask=mask)
    return total


@triton.jit(do_not_specialize=["rows", "offset"])
def _all_reduce_add_rms_norm(
    BUFFERS, PADS, EPOCHS, RESIDUAL, WEIGHT, POST_WEIGHT, OUT, eps, rows, offset, residual_row,
    out_row, RANK: tl.constexpr, WORLD: tl.constexpr, PITCH: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, BARRIER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < N
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    if BARRIER:
        barrier(PADS, EPOCHS, program, RANK, WORLD, PITCH)
    programs = tl.num_programs(0)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        total = sum_of_row(
            BUFFERS, RESIDUAL, post_weight, eps, row, offset, residual_row, column, mask, WORLD, N,
            PLUS_ONE,
        )  # fmt: skip
        out = OUT + row * out_row + column
        tl.store(out, rms_norm(total, weight, eps, N, PLUS_ONE), mask=mask)


def all_reduce_add_rms_norm(
    buffers: SymmetricBuffers,
    turn: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
    barrier: bool = True,
) -> Tensor:
    """residual += the sum of all ranks' parts; returns rms_norm(residual) * weight.

    buffers:     this rank's; its part is in buffers.part(turn, T), written by earlier kernels of
                 the same stream.  Every rank calls this with the same T and turn
    turn:        0 or 1, other than that of the call before
    residual:    [T, N] of the parts' type, rows at any stride; the same on all ranks
    weight:      [N]; post_weight [N] of a norm of the parts' sum, before it is added, or None
    plus_one:    both norms multiply by their weight + 1
    barrier:     False: the caller knows that all parts are complete
    """
    rows, size = residual.shape
    assert rows <= buffers.max_rows and size == buffers.size and residual.dtype == buffers.dtype
    assert weight.shape == (size,) and residual.stride(1) == weight.stride(0) == 1
    assert post_weight is None or (post_weight.shape == (size,) and post_weight.stride(0) == 1)
    out = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    if not rows:
        return out
    block = triton.next_power_of_2(size)
    _all_reduce_add_rms_norm[(min(rows, buffers.programs),)](
        buffers.addresses, buffers.pads, buffers.epochs, residual, weight, post_weight, out, eps,
        rows, turn * buffers.turn_elements, residual.stride(0), out.stride(0), RANK=buffers.rank,
        WORLD=buffers.world, PITCH=MAX_PROGRAMS, N=size, BLOCK=block, PLUS_ONE=plus_one,
        BARRIER=barrier, num_warps=norm_warps(block, norms=1 if post_weight is None else 2),
        **dependent_launch(residual.device),
    )  # fmt: skip
    return out
