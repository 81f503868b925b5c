# sigmoid_mul: attention's output times the sigmoid of its gate.
#   grid      (R, blocks of heads)
#   reads     x [R, heads, D] bf16, fp16 or fp32; gates [T, heads, D], tokens and heads at any
#             stride; rows [R] int64, the token of each row, or none: all tokens in order
#   writes    x * sigmoid(gate), in place
#   math      fp32, rounded once
#   launch    dependents are launched at once; it reads nothing before the wait
#   bound     memory: 3 * R * heads * D * bytes
#   checked   tests/model_zoo/layers/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait

BLOCK = 1024  # values of a program


@triton.jit
def _sigmoid_mul(
    X, GATES, ROWS, x_token, gate_token, gate_head, N: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = value < N
    if DEPENDENT:
        start_successor_and_wait()
    token = row
    if ROWS is not None:
        token = tl.load(ROWS + row)
    at = GATES + token * gate_token + (value // D) * gate_head + value % D
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(X + row * x_token + value, mask=mask, other=0.0)
    product = x.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(X + row * x_token + value, product.to(x.dtype), mask=mask)


def sigmoid_mul(x: Tensor, gates: Tensor, rows: Tensor | None = None) -> Tensor:
    """x [R, heads, D], which is overwritten, times the sigmoid of gates [T, heads, D].

    rows: [R] int64, the token of each of x's rows; None: R = T, in order
    """
    count, heads, size = x.shape
    assert x.stride(1) == size and x.stride(2) == gates.stride(2) == 1
    assert gates.shape[1:] == x.shape[1:] and (rows is not None or len(gates) == count)
    if rows is not None:
        assert rows.shape == (count,) and rows.dtype == torch.int64 and rows.is_contiguous()
    if count:
        values = heads * size
        _sigmoid_mul[(count, triton.cdiv(values, BLOCK))](
            x, gates, rows, x.stride(0), gates.stride(0), gates.stride(1), N=values, D=size,
            BLOCK=BLOCK, num_warps=4, **dependent_launch(x.device),
        )  # fmt: skip
    return x
