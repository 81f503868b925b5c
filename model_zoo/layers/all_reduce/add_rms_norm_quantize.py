# all_reduce_add_rms_norm_quantize: all_reduce_add_rms_norm whose norm is written as 8-bit codes.
#   grid      (P): program p has rows p, p + P, ... of the codes
#   writes    the sum into residual; codes and scales as add_rms_norm_quantize (quantize_rows.py)
#   math      as both: the codes are those of the norm that all_reduce_add_rms_norm writes
#   bound     NVLink: (world - 1) * T * N * bytes
#   checked   tests/model_zoo/layers/all_reduce/
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.all_reduce.add_rms_norm import barrier, sum_of_row
from model_zoo.layers.all_reduce.symmetric_buffers import MAX_PROGRAMS, SymmetricBuffers
from model_zoo.layers.kernels.add_rms_norm import norm_warps, rms_norm
from model_zoo.layers.quantized_gemm.quantize_rows import group_of, room_for, write_codes
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind


@triton.jit(do_not_specialize=["M", "rows", "offset"])
def _all_reduce_add_rms_norm_quantize(
    BUFFERS, PADS, EPOCHS, RESIDUAL, WEIGHT, POST_WEIGHT, CODES, SCALES, ZEROS, eps, M, rows,
    offset, residual_row, RANK: tl.constexpr, WORLD: tl.constexpr, PITCH: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PLUS_ONE: tl.constexpr,
    BARRIER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + column, mask=column < N, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=column < N, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    if BARRIER:
        barrier(PADS, EPOCHS, program, RANK, WORLD, PITCH)
    programs = tl.num_programs(0)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        mask = (column < N) & (row < M)
        total = sum_of_row(
            BUFFERS, RESIDUAL, post_weight, eps, row, offset, residual_row, column, mask, WORLD, N,
            PLUS_ONE,
        )  # fmt: skip
        x = rms_norm(total, weight, eps, N, PLUS_ONE)
        write_codes(x, CODES, SCALES, ZEROS, row, rows, 0, N, BLOCK, GROUP)


def all_reduce_add_rms_norm_quantize(
    buffers: SymmetricBuffers,
    turn: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: ScaleKind,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
    barrier: bool = True,
) -> QuantizedRows:
    """residual += the sum of all ranks' parts; the codes of rms_norm(residual) * weight.

    The arguments are those of all_reduce_add_rms_norm, of bf16 or fp16; kind: of the scales.
    """
    count, size = residual.shape
    assert count <= buffers.max_rows and size == buffers.size and residual.dtype == buffers.dtype
    assert weight.shape == (size,) and residual.stride(1) == weight.stride(0) == 1
    assert post_weight is None or (post_weight.shape == (size,) and post_weight.stride(0) == 1)
    out = room_for(residual, count, size, kind)
    if count:
        rows, block = len(out.codes), triton.next_power_of_2(size)
        _all_reduce_add_rms_norm_quantize[(min(rows, buffers.programs),)](
            buffers.addresses, buffers.pads, buffers.epochs, residual, weight, post_weight,
            out.codes, out.scales, out.zeros, eps, count, rows, turn * buffers.turn_elements,
            residual.stride(0), RANK=buffers.rank, WORLD=buffers.world, PITCH=MAX_PROGRAMS,
            N=size, BLOCK=block, GROUP=group_of(kind), PLUS_ONE=plus_one, BARRIER=barrier,
            num_warps=norm_warps(block, norms=1 if post_weight is None else 2),
            **dependent_launch(residual.device),
        )  # fmt: skip
    return out
