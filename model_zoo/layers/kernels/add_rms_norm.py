# add_rms_norm: the sum that goes on to the next block, and its RMSNorm.
#   grid      (T): a program has a row
#   reads     x [T, N] bf16, fp16 or fp32; residual [T, N] alike, or none; weight [N]
#   writes    residual + x into residual, and the norm of it into out, which may be x
#   math      the sum rounded to its type; its mean square in fp32; the quotient rounded, and the
#             product with the weight rounded again, as PyTorch's operations are
#   launch    a small kernel: its successor starts at once.  Before it waits it reads the weight
#   bound     memory: 4 * T * N * bytes, or 2 without a residual
#   checked   tests/model_zoo/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import dependent_launch, start_successor_and_wait

FEW_ROWS = 256  # up to here a launch is bound by latency: 16 bytes of each tensor a thread


@triton.jit
def _add_rms_norm(
    X, RESIDUAL, WEIGHT, OUT, eps, x_row, residual_row, out_row,
    N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    x = tl.load(X + row * x_row + column, mask=mask, other=0.0)
    if RESIDUAL is not None:
        at = RESIDUAL + row * residual_row + column
        x = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(at, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    normed = (wide * factor).to(x.dtype).to(tl.float32)
    tl.store(OUT + row * out_row + column, (weight * normed).to(x.dtype), mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    num_warps: int | None = None,
) -> None:
    """residual += x; out = rms_norm(residual) * weight.  Without a residual, out is of x.

    x, residual, out: [T, N] of one type, rows at any stride; out may be x
    weight:           [N]
    """
    rows, size = x.shape
    assert out.shape == x.shape and out.dtype == x.dtype and weight.shape == (size,)
    assert x.stride(1) == out.stride(1) == weight.stride(0) == 1
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype
        assert residual.stride(1) == 1
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    if num_warps is None:
        num_warps = max(1, min(16 if rows <= FEW_ROWS else 8, block // 256))
    _add_rms_norm[(rows,)](
        x, residual, weight, out, eps, x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        N=size, BLOCK=block, num_warps=num_warps, **dependent_launch(x.device),
    )  # fmt: skip
