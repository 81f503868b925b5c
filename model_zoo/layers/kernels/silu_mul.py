# silu_mul, gelu_tanh_mul: the activation of a gated MLP.
#   grid      (T, blocks of columns)
#   reads     gate_up [T, 2 * I] bf16, fp16 or fp32: gates, then ups; scales of its rows and
#             columns, if it is UnscaledRows
#   writes    silu(gate) * up, [T, I], or gelu(gate) * up with gelu's approximation by tanh
#   math      fp32; the activated gate is rounded to its type before the product, as PyTorch's is
#   launch    dependents are launched at once; before the wait it reads columns' scales
#   bound     memory: 3 * T * I * bytes
#   checked   tests/model_zoo/layers/test_small_kernels.py against PyTorch's operations
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.kernels.add_rms_norm import scaled
from model_zoo.layers.quantized_rows import UnscaledRows, parts_of


@triton.jit
def gate_mul(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up, of their type."""
    wide = gate.to(tl.float32)
    factor = wide
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z); 2 sqrt(2 / pi) = 1.5957691
        factor = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = (wide / (1.0 + tl.exp(-factor))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def load_both(GATE_UP, ROW_SCALES, COLUMN_SCALES, row, row_stride, column, mask, K,
              DEPENDENT: tl.constexpr):  # fmt: skip
    """The gates and ups at columns of a row, after the wait; K gates are followed by K ups."""
    if COLUMN_SCALES is not None:
        of_gates = tl.load(COLUMN_SCALES + column, mask=mask, other=0.0).to(tl.float32)
        of_ups = tl.load(COLUMN_SCALES + K + column, mask=mask, other=0.0).to(tl.float32)
    at = GATE_UP + row * row_stride + column
    if DEPENDENT:
        start_successor_and_wait()
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + K, mask=mask, other=0.0)
    if COLUMN_SCALES is not None:
        gate, up = scaled(gate, ROW_SCALES, row, of_gates), scaled(up, ROW_SCALES, row, of_ups)
    return gate, up


@triton.jit
def _silu_mul(
    GATE_UP, ROW_SCALES, COLUMN_SCALES, OUT, row_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate, up = load_both(
        GATE_UP, ROW_SCALES, COLUMN_SCALES, row, row_stride, column, mask, N, DEPENDENT
    )
    tl.store(OUT + row * N + column, gate_mul(gate, up, GELU), mask=mask)


def silu_mul(gate_up: Tensor | UnscaledRows, *, block: int = 1024, num_warps: int = 8) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 * I], rows at any stride -> [T, I].

    block, num_warps: columns of each half per program, and its warps.  On an H100 8 bytes
                      per thread are as fast as 16 or, at 256 rows, 9 % faster
    """
    return _gate_mul(gate_up, block, num_warps, gelu=False)


def gelu_tanh_mul(
    gate_up: Tensor | UnscaledRows, *, block: int = 1024, num_warps: int = 8
) -> Tensor:
    """gelu(gate) * up, by tanh; otherwise as silu_mul."""
    return _gate_mul(gate_up, block, num_warps, gelu=True)


def _gate_mul(both: Tensor | UnscaledRows, block: int, num_warps: int, *, gelu: bool) -> Tensor:
    gate_up, row_scales, column_scales = parts_of(both)
    rows, columns = gate_up.shape
    assert columns % 2 == 0 and gate_up.stride(1) == 1
    size = columns // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, block))](
            gate_up, row_scales, column_scales, out, gate_up.stride(0), N=size, BLOCK=block,
            GELU=gelu, num_warps=num_warps, **dependent_launch(gate_up.device),
        )  # fmt: skip
    return out
