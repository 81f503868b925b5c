# all_reduce_add_rms_norm: the sum of all ranks' parts, the residual sum and its RMSNorm.
#   grid      (P): program p has rows p, p + P, ...; the same P on all ranks, and all P resident.
#             Without SENDS a program per row: no other rank waits for them
#   reads     part [T, N] of this rank, bf16, fp16 or fp32; residual [T, N]; weight [N]; post_weight
#             [N] or none: of a norm of the parts' sum; the parts of other ranks in its own memory
#   writes    part into the memory of all other ranks; the sum into residual, its norm into out
#   math      parts are added in fp32 in the order of the ranks, then the residual, rounded once to
#             its type; with POST_WEIGHT the parts' sum is rounded and normed first.  The norm as in
#             add_rms_norm.  All ranks compute the same operations, and get the same bits
#   SENDS     if not, a GEMM before this kernel has sent the part (gemm/sending.py)
#   order     a program has sent AHEAD rows more than it has added, so that NVLink carries some
#             while others are added (sum_of_row.py)
#   wait      without a limit, as NCCL's, or as long as LIMIT[0] says: then a program goes on with
#             what is there, and says so in LIMIT[1].  Limits are in microseconds on a GPU, and in
#             polls where the kernel is interpreted.  Once a program has given up none waits for
#             longer than a poll
#   launch    dependents are launched at once; before the wait it reads the weight
#   bound     NVLink: (world - 1) * T * N * bytes; for few rows the latency of a store to a peer
#   checked   tests/model_zoo/layers/all_reduce/
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.all_reduce.sum_of_row import send_row, sum_of_row
from model_zoo.layers.all_reduce.symmetric_buffers import SymmetricBuffers, programs_per_sm
from model_zoo.layers.kernels.add_rms_norm import norm_warps, rms_norm

AHEAD = 2  # rows that a program has sent before it waits for the first
SM_REGISTERS, MAX_REGISTERS = 65_536, 255  # of a multiprocessor and of a thread


@triton.jit(do_not_specialize=["rows", "turn_at", "slot"])
def _all_reduce_add_rms_norm(
    PART, MEMORIES, LIMIT, RESIDUAL, WEIGHT, POST_WEIGHT, OUT, eps, rows, turn_at, slot, part_row,
    residual_row, out_row, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, AHEAD: tl.constexpr,
    SENDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < N
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    for ahead in tl.static_range(AHEAD if SENDS else 0):
        row = (program + ahead * programs).to(tl.int64)
        send_row(PART, MEMORIES, turn_at, slot, row, rows, part_row, column, mask, RANK, WORLD, N)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        if SENDS:
            next_row = row + AHEAD * programs
            send_row(
                PART, MEMORIES, turn_at, slot, next_row, rows, part_row, column, mask, RANK, WORLD,
                N,
            )  # fmt: skip
        total = sum_of_row(
            PART, MEMORIES, LIMIT, RESIDUAL, post_weight, eps, row, turn_at, slot, part_row,
            residual_row, column, mask, RANK, WORLD, N, PLUS_ONE,
        )  # fmt: skip
        out = OUT + row * out_row + column
        tl.store(out, rms_norm(total, weight, eps, N, PLUS_ONE), mask=mask)


def all_reduce_add_rms_norm(
    buffers: SymmetricBuffers,
    turn: int,
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
    is_sent: bool = False,
) -> Tensor:
    """residual += the sum of all ranks' parts; returns rms_norm(residual) * weight.

    buffers:        this rank's.  Every rank calls this with the same T and turn
    turn:           the number of a buffer, other than that of the call before: 0 or 1, or
                    OF_EMBEDDINGS
    part, residual: [T, N] of the buffers' type, rows at any stride; residual is the same on all
                    ranks
    weight:         [N]; post_weight [N] of a norm of the parts' sum, before it is added, or None
    plus_one:       both norms multiply by their weight + 1
    is_sent:        a GEMM has sent `part` to the other ranks
    """
    check_operands(buffers, part, residual, weight, post_weight)
    rows, size = residual.shape
    out = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    if not rows:
        return out
    block = triton.next_power_of_2(size)
    _all_reduce_add_rms_norm[(num_programs(buffers, rows, is_sent=is_sent),)](
        part, buffers.addresses, buffers.limit, residual, weight, post_weight, out, eps, rows,
        *buffers.offsets(turn), part.stride(0), residual.stride(0), out.stride(0),
        RANK=buffers.rank, WORLD=buffers.world, N=size, BLOCK=block, PLUS_ONE=plus_one,
        AHEAD=AHEAD, SENDS=not is_sent,
        **warps_and_registers(block, norms=1 if post_weight is None else 2),
        **dependent_launch(residual.device),
    )  # fmt: skip
    return out


def num_programs(buffers: SymmetricBuffers, rows: int, *, is_sent: bool) -> int:
    """Of a launch; see `grid` above."""
    return rows if is_sent else min(rows, buffers.programs)


def warps_and_registers(block: int, *, norms: int) -> dict[str, int | None]:
    """Launch options: the warps of norm_warps, and few enough registers for programs_per_sm."""
    warps = norm_warps(block, norms=norms)
    registers = SM_REGISTERS // (programs_per_sm(block) * warps * 32)
    return {"num_warps": warps, "maxnreg": registers if registers < MAX_REGISTERS else None}


def check_operands(
    buffers: SymmetricBuffers,
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    post_weight: Tensor | None,
) -> None:
    rows, size = residual.shape
    assert part.shape == residual.shape and part.dtype == residual.dtype == buffers.dtype
    assert rows <= buffers.max_rows and weight.shape == (size,) and size == buffers.size
    assert part.stride(1) == residual.stride(1) == weight.stride(0) == 1
    assert post_weight is None or (post_weight.shape == (size,) and post_weight.stride(0) == 1)
