"""Device functions of the experts' kernels: tiles of weights of any format, and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.softmax import dot
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.quantized_gemm.decode import decoding, load_weight, scale_is_per_row
from model_zoo.layers.quantized_gemm.decode_bf16 import (
    BLOCK_COLUMNS,
    SUM_FACTORS,
    decodes_to_bf16,
    load_weight_bf16,
)
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.moe_config import CLAMP_ALPHA, CLAMP_LIMIT

LIMIT, ALPHA = tl.constexpr(CLAMP_LIMIT), tl.constexpr(CLAMP_ALPHA)
# Of maximum and minimum, as PyTorch's: a broken checkpoint is to be seen in the outputs.
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def gate_up_rows(n, inner):
    """Outputs n [BLOCK_N] of an expert -> [2 * BLOCK_N] rows of its weight: gates, then ups.

    One product of both has tiles of 64 rows, which wgmma takes, at half as many outputs; and where
    BLOCK_N is 16 times the number of warps a gate and its up are in one thread.
    """
    BLOCK_N: tl.constexpr = n.shape[0]
    gates = tl.minimum(n, inner - 1)
    return tl.join(gates, gates + inner).permute(1, 0).reshape(2 * BLOCK_N)


@triton.jit
def add_product(
    acc, x, W, SCALES, ZEROS, n, start, N, K, width, scale_row, scale_column, MODE: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, PER_ROW: tl.constexpr,
    SCALES_SUMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, rows of x] + columns start.. of rows n, all below N, of one weight times x.

    x      [BLOCK_K, rows], 0 beyond K
    width  elements of a row in memory: K, or of a packed weight its words
    MODE   "plain": an unquantized weight; "float32", "bfloat16": how a packed one is dequantized
    """
    if MODE == "plain":
        k = start + tl.arange(0, BLOCK_K)
        at = W + n.to(tl.int64)[:, None] * width + k[None, :]
        w = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[None, :], other=0.0)
    else:
        columns = width * (4 if KIND == "int8" or KIND == "fp8" else 8)
        SCALED: tl.constexpr = not (PER_ROW or SCALES_SUMS)
        if MODE == "bfloat16":
            w = load_weight_bf16(
                W, SCALES, ZEROS, n, start, columns, scale_row, scale_column, KIND, SCALE, BLOCK_K,
                RUN, COLUMN_GROUP, SCALED,
            )  # fmt: skip
        else:
            w = load_weight(
                W, SCALES, ZEROS, n, start, N, columns, scale_row, scale_column, KIND, SCALE, UNIT,
                BLOCK_K, RUN, ROW_GROUP, COLUMN_GROUP, SCALED,
            ).to(x.dtype)  # fmt: skip
    if SCALES_SUMS:
        place = (n // ROW_GROUP) * scale_row + start // COLUMN_GROUP * scale_column
        acc += dot(w, x, tl.zeros_like(acc), PRECISION) * tl.load(SCALES + place)[:, None]
    else:
        acc = dot(w, x, acc, PRECISION)
    return acc


@triton.jit
def row_factor(
    SCALES, ROW_SCALES, n, MODE: tl.constexpr, UNIT: tl.constexpr, PER_ROW: tl.constexpr
):
    """-> [BLOCK_N] float32: what multiplies the sums of whole rows n."""
    factor = tl.full(n.shape, UNIT if MODE == "bfloat16" else 1.0, tl.float32)
    if PER_ROW:
        factor = tl.load(SCALES + n).to(tl.float32) * UNIT
    if ROW_SCALES is not None:
        factor *= tl.load(ROW_SCALES + n)
    return factor


@triton.jit
def load_columns(X, rows, real, start, K, row_stride, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns start.. of rows of x -> [BLOCK_K, rows]; 0 beyond K, and of rows that are not real,
    which are not read: few are, where tokens are few."""
    k = start + tl.arange(0, BLOCK_K)
    at = X + rows.to(tl.int64)[None, :] * row_stride + k[:, None]
    mask = real[None, :] if EVEN_K else real[None, :] & (k < K)[:, None]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def expert_product(
    X, x_rows, real, x_row_stride, W, SCALES, ZEROS, ROW_SCALES, BIAS, expert, rows, N, K, width,
    scale_expert, scale_row, scale_column, MODE: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr, ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr, PER_ROW: tl.constexpr, SCALES_SUMS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """-> [rows, x_rows] float32: rows [*], all below N, of one expert's weight times rows of x,
    with the expert's scales and bias.

    real  of x_rows: the others are taken as 0
    """
    at_expert = expert.to(tl.int64)
    W += at_expert * N * width
    if SCALES is not None:
        SCALES += at_expert * scale_expert
    if ZEROS is not None:
        ZEROS += at_expert * scale_expert
    if ROW_SCALES is not None:
        ROW_SCALES += at_expert * N
    acc = tl.zeros([rows.shape[0], x_rows.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_columns(X, x_rows, real, start, K, x_row_stride, BLOCK_K, EVEN_K)
        acc = add_product(
            acc, x, W, SCALES, ZEROS, rows, start, N, K, width, scale_row, scale_column, MODE, KIND,
            SCALE, UNIT, RUN, ROW_GROUP, COLUMN_GROUP, PER_ROW, SCALES_SUMS, PRECISION, BLOCK_K,
            EVEN_K,
        )  # fmt: skip
    acc *= row_factor(SCALES, ROW_SCALES, rows, MODE, UNIT, PER_ROW)[:, None]
    if BIAS is not None:
        acc += tl.load(BIAS + at_expert * N + rows).to(tl.float32)[:, None]
    return acc


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-tl.maximum(z, -80.0, ALL)))  # exp of more would be infinite


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """As activate() of activation.py, in float32."""
    if ACTIVATION == "silu_mul":
        y = gate * sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh_mul":
        # (1 + tanh(z)) / 2 = sigmoid(2 z); 2 sqrt(2 / pi) = 1.5957691
        y = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, ALL)
        up = tl.minimum(tl.maximum(up, -LIMIT, ALL), LIMIT, ALL)
        y = (up + 1.0) * gate * sigmoid(gate * ALPHA)
    return y


@dataclass(frozen=True, slots=True)
class WeightArguments:
    """What a kernel is given of an ExpertStack."""

    tensors: tuple[Tensor | None, ...]  # weight or words, scales, zeros, row scales, bias
    width: int
    columns: int  # of a row: K, or more in a packed weight
    strides: tuple[int, int, int]  # of scales: of an expert, a row, a column
    options: dict[str, Any]  # constants of the format

    @property
    def row_bytes(self) -> int:
        weight = self.tensors[0]
        assert weight is not None
        return self.width * weight.element_size()

    def of_tile(self, columns: int, inputs: int) -> dict[str, Any]:
        """The format's constants, and those of a step of so many columns of K = inputs."""
        if self.options["SCALES_SUMS"]:
            columns = min(columns, BLOCK_COLUMNS)
        if self.options["MODE"] == "bfloat16" and self.columns % columns:  # read by whole steps
            columns = BLOCK_COLUMNS
        run = min(self.options["RUN"], columns)
        return {**self.options, "RUN": run, "BLOCK_K": columns, "EVEN_K": inputs % columns == 0}


def weight_arguments(stack: ExpertStack) -> WeightArguments:
    if stack.packed is None:
        options = {
            "MODE": "plain", "KIND": "", "SCALE": "", "UNIT": 1.0, "RUN": 1, "ROW_GROUP": 1,
            "COLUMN_GROUP": 1, "PER_ROW": False, "SCALES_SUMS": False,
        }  # fmt: skip
        tensors = (stack.weight, None, None, None, stack.bias)
        return WeightArguments(tensors, stack.inputs, stack.inputs, (0, 0, 0), options)
    whole, one = stack.packed.stack(), stack.packed.of(0)
    found, per_row = decoding(one), scale_is_per_row(one)
    narrow = stack.dtype == torch.bfloat16 and decodes_to_bf16(one, found.run)
    options = {
        "MODE": "bfloat16" if narrow else "float32", "KIND": one.kind, "SCALE": found.kind,
        "UNIT": SUM_FACTORS[one.kind] if narrow else found.unit, "RUN": found.run,
        "ROW_GROUP": one.row_group, "COLUMN_GROUP": one.column_group, "PER_ROW": per_row,
        "SCALES_SUMS": narrow and one.kind == "fp8" and not per_row,
    }  # fmt: skip
    tensors = (whole.words, _stored_scales(whole), whole.zeros, whole.row_scales, stack.bias)
    strides = (found.scales.numel(), found.scale_row, found.scale_column)
    return WeightArguments(tensors, one.words.shape[1], one.shape[1], strides, options)


def _stored_scales(weight: PackedWeight) -> Tensor:
    """Scales of 8 bits as their bits, as decoding() has them."""
    narrow = weight.scales.dtype.itemsize == 1
    return weight.scales.view(torch.uint8) if narrow else weight.scales
