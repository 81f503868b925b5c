# embed: the first kernel of a step gathers embeddings, norms them for the first layer, and computes
# cos and sin of the rope angles.
#   grid      (T, 1 + ropes): a program has a token's embedding, or its row of a rope's cos_sin
#   reads     tokens, positions [T] int64; embeddings [rows, N] bf16, fp16 or fp32; weight [N] of
#             the norm; of one or two ropes frequencies [D / 2] fp32, where D values of a head are
#             rotated
#   writes    residual [T, N], the embeddings * embedding_scale; x [T, N], their norm; of each rope
#             cos_sin [T, D] of the same dtype: cos(angle) * scale, then sin
#   OWN       x is the embeddings of tokens FIRST to FIRST + COUNT, which are all that `embeddings`
#             has, and zeros of others; no norm is computed, and residual is zeros
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


@triton.jit(do_not_specialize=["first", "count"])
def _embed(
    TOKENS, POSITIONS, EMBEDDINGS, WEIGHT, FREQUENCIES, FREQUENCIES_2, X, RESIDUAL, COS_SIN,
    COS_SIN_2, eps, embedding_scale, scale, scale_2, embedding_row, first, count, N: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_HALF: tl.constexpr, SCALED: tl.constexpr,
    PLUS_ONE: tl.constexpr, OWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)
        mask = column < N
        if not OWN:
            weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
        if DEPENDENT:
            start_successor_and_wait()
        token, there = tl.load(TOKENS + row).to(tl.int64), mask
        if OWN:
            token -= first
            there = mask & (token >= 0) & (token < count)
        x = tl.load(EMBEDDINGS + token * embedding_row + column, mask=there, other=0.0)
        if SCALED:
            x = (x.to(tl.float32) * embedding_scale).to(x.dtype)
        at = row * N + column
        if OWN:
            tl.store(X + at, x, mask=mask)
            tl.store(RESIDUAL + at, tl.zeros_like(x), mask=mask)
        else:
            tl.store(RESIDUAL + at, x, mask=mask)
            tl.store(X + at, rms_norm(x, weight, eps, N, PLUS_ONE), mask=mask)
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
    assert weight.shape == (embeddings.shape[1],) and weight.stride(0) == 1
    options = {"eps": eps, "plus_one": plus_one, "embedding_scale": embedding_scale}
    return _launch(tokens, positions, embeddings, weight, ropes, **options)


def embed_own(
    tokens: Tensor,
    positions: Tensor,
    embeddings: Tensor,
    own_ids: tuple[int, int],
    ropes: Sequence[tuple[Tensor, float]],
    *,
    embedding_scale: float = 1.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As `embed`, of a rank that has the embeddings of some tokens, without the norm.

    own_ids     the first of these tokens, and the end: embeddings [end - first, N] are theirs
    Returns the rows of these tokens, zeros for others, and zeros, [T, N] each; and each cos_sin.
    """
    options = {"own_ids": own_ids, "embedding_scale": embedding_scale}
    return _launch(tokens, positions, embeddings, None, ropes, **options)


def _launch(
    tokens: Tensor,
    positions: Tensor,
    embeddings: Tensor,
    weight: Tensor | None,
    ropes: Sequence[tuple[Tensor, float]],
    *,
    eps: float = 0.0,
    embedding_scale: float,
    plus_one: bool = False,
    own_ids: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """weight: None with own_ids"""
    rows, size, half = len(tokens), embeddings.shape[1], len(ropes[0][0])
    assert tokens.shape == positions.shape == (rows,) and embeddings.stride(1) == 1
    assert tokens.is_contiguous() and positions.is_contiguous() and len(ropes) in (1, 2)
    for frequencies, _ in ropes:
        assert frequencies.is_contiguous() and frequencies.dtype == torch.float32
        assert frequencies.shape == (half,)
    first, end = own_ids or (0, 0)
    x, residual = (embeddings.new_empty(rows, size) for _ in range(2))
    cos_sin = [embeddings.new_empty(rows, 2 * half) for _ in ropes]
    if rows:
        block = triton.next_power_of_2(size)
        two = len(ropes) == 2
        _embed[(rows, 1 + len(ropes))](
            tokens, positions, embeddings, weight, ropes[0][0], ropes[1][0] if two else None, x,
            residual, cos_sin[0], cos_sin[1] if two else None, eps, embedding_scale, ropes[0][1],
            ropes[1][1] if two else 1.0, embeddings.stride(0), first, end - first, N=size,
            BLOCK=block, D=2 * half, BLOCK_HALF=triton.next_power_of_2(half),
            SCALED=embedding_scale != 1.0, PLUS_ONE=plus_one, OWN=own_ids is not None,
            num_warps=norm_warps(block), **dependent_launch(embeddings.device),
        )  # fmt: skip
    return x, residual, cos_sin
