# add_rms_norm: the residual sum and its RMSNorm.
#   grid      (T): a program per row
#   reads     x, residual [T, N] bf16, fp16 or fp32; weight [N].  Without x, residual is the sum.
#             post_weight [N] or none: of a norm of x before the sum.  Scales of x's rows and
#             columns, if it is UnscaledRows
#   writes    residual + x into residual, and its norm into x, or without x into out
#   math      the sum rounded to its type; its mean square in fp32; rounded after the division
#             and after the product with the weight, as PyTorch's operations.  With PLUS_ONE, 1 is
#             added to the weight in fp32, and the product is rounded once
#   launch    dependents are launched at once; before the wait it reads weights and columns' scales
#   bound     memory: 4 * T * N * bytes, half of that without x
#   checked   tests/model_zoo/layers/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.quantized_rows import UnscaledRows, parts_of


@triton.jit
def rms_norm(x, weight, eps, N: tl.constexpr, PLUS_ONE: tl.constexpr = False):
    """The RMSNorm of a row x of N elements, zero-padded; weight in fp32."""
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    if PLUS_ONE:
        return (wide * factor * (1.0 + weight)).to(x.dtype)
    return (weight * (wide * factor).to(x.dtype).to(tl.float32)).to(x.dtype)


@triton.jit
def scaled(x, ROW_SCALES, row, of_columns):
    """x of a row times its scale and those of its columns, rounded to its type: UnscaledRows."""
    return (x.to(tl.float32) * (tl.load(ROW_SCALES + row) * of_columns)).to(x.dtype)


@triton.jit
def residual_sum(
    X, ROW_SCALES, of_columns, RESIDUAL, post_weight, eps, row, x_row, residual_row, column, mask,
    N: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """residual + x of a row, or + the norm of x by post_weight; without x the residual.

    A sum is stored in the residual.  ROW_SCALES, of_columns: as of `scaled`, or None
    """
    residual_at = RESIDUAL + row * residual_row + column
    total = tl.load(residual_at, mask=mask, other=0.0)
    if X is not None:
        x = tl.load(X + row * x_row + column, mask=mask, other=0.0)
        if of_columns is not None:
            x = scaled(x, ROW_SCALES, row, of_columns)
        if post_weight is not None:
            x = rms_norm(x, post_weight, eps, N, PLUS_ONE)
        total = (total.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_at, total, mask=mask)
    return total


@triton.jit
def _add_rms_norm(
    X, ROW_SCALES, COLUMN_SCALES, RESIDUAL, WEIGHT, POST_WEIGHT, OUT, eps, out_row, residual_row,
    N: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    of_columns = None
    if COLUMN_SCALES is not None:
        of_columns = tl.load(COLUMN_SCALES + column, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    total = residual_sum(
        X, ROW_SCALES, of_columns, RESIDUAL, post_weight, eps, row, out_row, residual_row, column,
        mask, N, PLUS_ONE,
    )  # fmt: skip
    tl.store(OUT + row * out_row + column, rms_norm(total, weight, eps, N, PLUS_ONE), mask=mask)


def norm_warps(block: int, *, norms: int = 1) -> int:
    """Warps for a row padded to `block` elements, and so many norms.

    The same for any number of rows, so that a row's sum has the same bits in every batch.  On an
    H100 4 to 16 warps are within 3 % of each other for 4096 elements, 2 to 8 for 1024.
    """
    elements = norms * block  # two norms: twice the threads, so that weights fit into registers
    return max(1, min(elements // 256, max(4, elements // 1024)))


def add_rms_norm(
    y: Tensor | UnscaledRows,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
    num_warps: int | None = None,
) -> Tensor:
    """residual += y; returns rms_norm(residual) * weight, in the memory of y.

    y, residual: [T, N] of one type, rows at any stride
    weight:      [N]
    post_weight: [N], of a norm of y before it is added; None: there is no such norm
    plus_one:    both norms multiply by their weight + 1
    """
    x, row_scales, column_scales = parts_of(y)
    rows, size = x.shape
    assert residual.shape == x.shape and residual.dtype == x.dtype and weight.shape == (size,)
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1
    assert post_weight is None or (post_weight.shape == (size,) and post_weight.stride(0) == 1)
    if rows == 0:
        return x
    block = triton.next_power_of_2(size)
    if num_warps is None:
        num_warps = norm_warps(block, norms=1 if post_weight is None else 2)
    _add_rms_norm[(rows,)](
        x, row_scales, column_scales, residual, weight, post_weight, x, eps, x.stride(0),
        residual.stride(0), N=size, BLOCK=block, PLUS_ONE=plus_one, num_warps=num_warps,
        **dependent_launch(x.device),
    )  # fmt: skip
    return x


def norm_of_sum(residual: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """rms_norm(residual) * weight of residual [T, N], rows at any stride; weight [N].

    plus_one: as in add_rms_norm
    """
    rows, size = residual.shape
    assert weight.shape == (size,) and residual.stride(1) == weight.stride(0) == 1
    out = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    if rows:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(rows,)](
            None, None, None, residual, weight, None, out, eps, out.stride(0), residual.stride(0),
            N=size, BLOCK=block, PLUS_ONE=plus_one, num_warps=norm_warps(block),
            **dependent_launch(residual.device),
        )  # fmt: skip
    return out
