# embed: the first kernel of a step gathers embeddings and makes the table of rotations.
#   grid      (T, 2): a program copies a token's embedding, or computes its row of the table
#   reads     tokens, positions [T] int64; weight [rows, N] bf16, fp16 or fp32;
#             frequencies [D / 2] fp32
#   writes    out [T, N]; rotation [T, D] of the same type: cos(angle) * scale, then sin
#   math      angle = position * frequency rounded to fp32; cos and sin of it by libdevice's
#             functions for fp32, exact to 2 units in the last place however large the angle is
#   launch    a small kernel: its successor starts at once; it reads weights only before it waits
#   bound     latency at few tokens; memory: T * (2 * N + D) * bytes
#   checked   tests/model_zoo/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import dependent_launch, start_successor_and_wait


@triton.jit
def _embed(
    TOKENS, POSITIONS, WEIGHT, FREQUENCIES, OUT, ROTATION, scale, weight_row,
    N: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    frequency = tl.load(FREQUENCIES + dim, mask=dim < HALF, other=0.0)
    if DEPENDENT:
        start_successor_and_wait()
    if tl.program_id(1) == 0:
        token = tl.load(TOKENS + row).to(tl.int64)
        column = tl.arange(0, BLOCK)
        values = tl.load(WEIGHT + token * weight_row + column, mask=column < N)
        tl.store(OUT + row * N + column, values, mask=column < N)
    else:
        angle = tl.load(POSITIONS + row).to(tl.float32) * frequency
        at = ROTATION + row * D + dim
        dtype = ROTATION.dtype.element_ty
        tl.store(at, (tl.cos(angle) * scale).to(dtype), mask=dim < HALF)
        tl.store(at + HALF, (tl.sin(angle) * scale).to(dtype), mask=dim < HALF)


def embed(
    tokens: Tensor, positions: Tensor, weight: Tensor, frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of weight [rows, N] by tokens [T], and the rotations of positions [T].

    frequencies: [head_dim / 2] float32, the angle that a position adds
    scale:       what cos and sin are multiplied with
    Returns [T, N] and [T, head_dim], cos of all angles and then sin, in the type of weight.
    """
    rows, size, half = len(tokens), weight.shape[1], len(frequencies)
    assert tokens.shape == positions.shape == (rows,)
    assert tokens.is_contiguous() and positions.is_contiguous() and frequencies.is_contiguous()
    assert frequencies.dtype == torch.float32 and weight.stride(1) == 1
    out = torch.empty(rows, size, dtype=weight.dtype, device=weight.device)
    rotation = torch.empty(rows, 2 * half, dtype=weight.dtype, device=weight.device)
    if rows:
        block = triton.next_power_of_2(size)
        _embed[(rows, 2)](
            tokens, positions, weight, frequencies, out, rotation, scale, weight.stride(0),
            N=size, BLOCK=block, D=2 * half, BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=max(1, min(8, block // 256)), **dependent_launch(weight.device),
        )  # fmt: skip
    return out, rotation
