# embed: the first kernel of a step gathers embeddings, norms them for the first layer, and computes
# cos and sin of the rope angles.
#   grid      (T, 2): a program has a token's embedding, or its row of cos_sin
#   reads     tokens, positions [T] int64; embeddings [rows, N] bf16, fp16 or fp32; weight [N] of
#             the norm; frequencies [D / 2] fp32
#   writes    residual [T, N], the embeddings; x [T, N], their norm; cos_sin [T, D] of the same
#             dtype: cos(angle) * scale, then sin
#   math      the norm as in add_rms_norm.py; angle = position * frequency rounded to fp32; cos and
#             sin of it by libdevice's functions for fp32, exact to 2 units in the last place
#             however large the angle is
#   launch    dependents are launched at once; before the wait it reads weights
#   bound     latency at few tokens; memory: T * (3 * N + D) * bytes
#   checked   tests/model_zoo/layers/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.kernels.add_rms_norm import norm_warps, rms_norm


@triton.jit
def _embed(
    TOKENS, POSITIONS, EMBEDDINGS, WEIGHT, FREQUENCIES, X, RESIDUAL, COS_SIN, eps, scale,
    embedding_row, N: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)
        mask = column < N
        weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
        if DEPENDENT:
            start_successor_and_wait()
        token = tl.load(TOKENS + row).to(tl.int64)
        x = tl.load(EMBEDDINGS + token * embedding_row + column, mask=mask, other=0.0)
        tl.store(RESIDUAL + row * N + column, x, mask=mask)
        tl.store(X + row * N + column, rms_norm(x, weight, eps, N), mask=mask)
    else:
        dim = tl.arange(0, BLOCK_HALF)
        half_mask = dim < HALF
        frequency = tl.load(FREQUENCIES + dim, mask=half_mask, other=0.0)
        if DEPENDENT:
            start_successor_and_wait()
        angle = tl.load(POSITIONS + row).to(tl.float32) * frequency
        at = COS_SIN + row * D + dim
        dtype = COS_SIN.dtype.element_ty
        tl.store(at, (tl.cos(angle) * scale).to(dtype), mask=half_mask)
        tl.store(at + HALF, (tl.sin(angle) * scale).to(dtype), mask=half_mask)


def embed(
    tokens: Tensor,
    positions: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    eps: float,
    frequencies: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of embeddings [rows, N] by tokens [T], their RMSNorm, and cos_sin of positions [T].

    weight, eps: of the norm, weight [N]
    frequencies: [head_dim / 2] float32, rope's inverse frequencies
    scale:       factor of cos and sin
    Returns the norm and the embeddings, [T, N] each, and cos_sin [T, head_dim], cos of all
    angles and then sin; all in the dtype of embeddings.
    """
    rows, size, half = len(tokens), embeddings.shape[1], len(frequencies)
    assert tokens.shape == positions.shape == (rows,) and weight.shape == (size,)
    assert tokens.is_contiguous() and positions.is_contiguous() and frequencies.is_contiguous()
    assert frequencies.dtype == torch.float32 and embeddings.stride(1) == weight.stride(0) == 1
    x, residual = (embeddings.new_empty(rows, size) for _ in range(2))
    cos_sin = embeddings.new_empty(rows, 2 * half)
    if rows:
        block = triton.next_power_of_2(size)
        _embed[(rows, 2)](
            tokens, positions, embeddings, weight, frequencies, x, residual, cos_sin, eps, scale,
            embeddings.stride(0), N=size, BLOCK=block, D=2 * half,
            BLOCK_HALF=triton.next_power_of_2(half), num_warps=norm_warps(block),
            **dependent_launch(embeddings.device),
        )  # fmt: skip
    return x, residual, cos_sin
