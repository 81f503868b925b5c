# embed: the first kernel of a step gathers embeddings, norms them for the first layer, and computes
# cos and sin of the rope angles.
#   grid      (T, 1 + ropes): a program has a token's embedding, or its row of a rope's cos_sin
#   reads     tokens, positions [T] int64; embeddings [rows, N] bf16, fp16 or fp32; weight [N] of
#             the norm; of one or two ropes frequencies [D / 2] fp32, where D values of a head are
#             rotated
#   writes    residual [T, N], the embeddings * embedding_scale; x [T, N], their norm; of each rope
#             cos_sin [T, D] of the same dtype: cos(angle) * scale, then sin
#   math      the norm as in add_rms_norm.py; scaled embeddings are rounded before it; angle =
#             position * frequency rounded to fp32; cos and sin of it by libdevice's functions for
#             fp32, exact to 2 units in the last place however large the angle is
#   launch    dependents are launched at once; before the wait it reads weights
#   bound     latency at few tokens; memory: T * (3 * N + D) * bytes
#   checked   tests/model_zoo/layers/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.kernels.add_rms_norm import norm_warps, rms_norm


@triton.jit
def _rope(
    FREQUENCIES, POSITIONS, COS_SIN, row, scale, D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
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


@triton.jit
def _embed(
    TOKENS, POSITIONS, EMBEDDINGS, WEIGHT, FREQUENCIES, FREQUENCIES_2, X, RESIDUAL, COS_SIN,
    COS_SIN_2, eps, embedding_scale, scale, scale_2, embedding_row, N: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_HALF: tl.constexpr, SCALED: tl.constexpr,
    PLUS_ONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)
        mask = column < N
        weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
        if DEPENDENT:
            start_successor_and_wait()
        token = tl.load(TOKENS + row).to(tl.int64)
        x = tl.load(EMBEDDINGS + token * embedding_row + column, mask=mask, other=0.0)
        if SCALED:
            x = (x.to(tl.float32) * embedding_scale).to(x.dtype)
        tl.store(RESIDUAL + row * N + column, x, mask=mask)
        tl.store(X + row * N + column, rms_norm(x, weight, eps, N, PLUS_ONE), mask=mask)
    elif tl.program_id(1) == 1:
        _rope(FREQUENCIES, POSITIONS, COS_SIN, row, scale, D, BLOCK_HALF, DEPENDENT)
    elif FREQUENCIES_2 is not None:
        _rope(FREQUENCIES_2, POSITIONS, COS_SIN_2, row, scale_2, D, BLOCK_HALF, DEPENDENT)


def embed(
    tokens: Tensor,
    positions: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    eps: float,
    ropes: Sequence[tuple[Tensor, float]],
    *,
    embedding_scale: float = 1.0,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Rows of embeddings [rows, N] by tokens [T], their RMSNorm, and cos_sin of positions [T].

    weight, eps: of the norm, weight [N]
    ropes:       one or two: inverse frequencies [dim / 2] float32, factor of cos and sin
    embedding_scale: the embeddings are multiplied by it
    plus_one:    the norm multiplies by its weight + 1
    Returns the norm and the embeddings, [T, N] each, and for each rope cos_sin [T, dim], cos of
    all angles and then sin; all in the dtype of embeddings.
    """
    rows, size, half = len(tokens), embeddings.shape[1], len(ropes[0][0])
    assert tokens.shape == positions.shape == (rows,) and weight.shape == (size,)
    assert tokens.is_contiguous() and positions.is_contiguous() and len(ropes) in (1, 2)
    assert embeddings.stride(1) == weight.stride(0) == 1
    for frequencies, _ in ropes:
        assert frequencies.is_contiguous() and frequencies.dtype == torch.float32
        assert frequencies.shape == (half,)
    x, residual = (embeddings.new_empty(rows, size) for _ in range(2))
    cos_sin = [embeddings.new_empty(rows, 2 * half) for _ in ropes]
    if rows:
        block = triton.next_power_of_2(size)
        two = len(ropes) == 2
        _embed[(rows, 1 + len(ropes))](
            tokens, positions, embeddings, weight, ropes[0][0], ropes[1][0] if two else None, x,
            residual, cos_sin[0], cos_sin[1] if two else None, eps, embedding_scale, ropes[0][1],
            ropes[1][1] if two else 1.0, embeddings.stride(0), N=size, BLOCK=block, D=2 * half,
            BLOCK_HALF=triton.next_power_of_2(half), SCALED=embedding_scale != 1.0,
            PLUS_ONE=plus_one, num_warps=norm_warps(block), **dependent_launch(embeddings.device),
        )  # fmt: skip
    return x, residual, cos_sin
