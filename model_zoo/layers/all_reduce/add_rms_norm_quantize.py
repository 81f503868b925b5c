# all_reduce_add_rms_norm_quantize: all_reduce_add_rms_norm whose norm is written as 8-bit codes.
#   grid      (P): program p has rows p, p + P, ... of the codes; without SENDS a program per row
#   writes    the sum into residual; codes and scales as add_rms_norm_quantize (quantize_rows.py)
#   math      as both: the codes are those of the norm that all_reduce_add_rms_norm writes
#   bound     NVLink: (world - 1) * T * N * bytes
#   checked   tests/model_zoo/layers/all_reduce/
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.all_reduce.add_rms_norm import (
    AHEAD,
    check_operands,
    num_programs,
    warps_and_registers,
)
from model_zoo.layers.all_reduce.sum_of_row import send_row, sum_of_row
from model_zoo.layers.all_reduce.symmetric_buffers import SymmetricBuffers
from model_zoo.layers.kernels.add_rms_norm import rms_norm
from model_zoo.layers.quantized_gemm.quantize_rows import group_of, room_for, write_codes
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind


@triton.jit(do_not_specialize=["M", "rows", "turn_at", "slot"])
def _all_reduce_add_rms_norm_quantize(
    PART, MEMORIES, LIMIT, RESIDUAL, WEIGHT, POST_WEIGHT, CODES, SCALES, ZEROS, eps, M, rows,
    turn_at, slot, part_row, residual_row, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PLUS_ONE: tl.constexpr, AHEAD: tl.constexpr,
    SENDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + column, mask=column < N, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=column < N, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    whole = column < N
    for ahead in tl.static_range(AHEAD if SENDS else 0):
        row = (program + ahead * programs).to(tl.int64)
        send_row(PART, MEMORIES, turn_at, slot, row, M, part_row, column, whole, RANK, WORLD, N)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        if SENDS:
            next_row = row + AHEAD * programs
            send_row(
                PART, MEMORIES, turn_at, slot, next_row, M, part_row, column, whole, RANK, WORLD, N
            )
        mask = (column < N) & (row < M)
        total = sum_of_row(
            PART, MEMORIES, LIMIT, RESIDUAL, post_weight, eps, row, turn_at, slot, part_row,
            residual_row, column, mask, RANK, WORLD, N, PLUS_ONE,
        )  # fmt: skip
        x = rms_norm(total, weight, eps, N, PLUS_ONE)
        write_codes(x, CODES, SCALES, ZEROS, row, rows, 0, N, BLOCK, GROUP)


def all_reduce_add_rms_norm_quantize(
    buffers: SymmetricBuffers,
    turn: int,
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: ScaleKind,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
    is_sent: bool = False,
) -> QuantizedRows:
    """residual += the sum of all ranks' parts; the codes of rms_norm(residual) * weight.

    The arguments are those of all_reduce_add_rms_norm, of bf16 or fp16; kind: of the scales.
    """
    check_operands(buffers, part, residual, weight, post_weight)
    count, size = residual.shape
    out = room_for(residual, count, size, kind)
    if count:
        rows, block = len(out.codes), triton.next_power_of_2(size)
        _all_reduce_add_rms_norm_quantize[(num_programs(buffers, rows, is_sent=is_sent),)](
            part, buffers.addresses, buffers.limit, residual, weight, post_weight, out.codes,
            out.scales, out.zeros, eps, count, rows, *buffers.offsets(turn), part.stride(0),
            residual.stride(0), RANK=buffers.rank, WORLD=buffers.world, N=size, BLOCK=block,
            GROUP=group_of(kind), PLUS_ONE=plus_one, AHEAD=AHEAD, SENDS=not is_sent,
            **warps_and_registers(block, norms=1 if post_weight is None else 2),
            **dependent_launch(residual.device),
        )  # fmt: skip
    return out
