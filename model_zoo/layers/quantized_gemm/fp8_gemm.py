"""y = x W^T + b of a PackedWeight by cuBLAS: in fp8, or in bf16 after dequantizing the weight.

For many rows, where cuBLAS is limited by its arithmetic and the passes before it are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import (
    GROUP,
    QuantizedRows,
    ScaleKind,
    quantize_rows,
)


@dataclass(frozen=True, slots=True)
class ScaledMM:
    """torch._scaled_mm of weights of kind fp8, with activations quantized to fp8 on the way.

    kind        "row": scales of rows of x and of W; compute capability 8.9 or more.
                "block": 1 x 128 of x, 128 x 128 of W; compute capability 9.0
    fast_accum  sums of fewer bits on the tensor cores; of kind "row" only
    """

    kind: ScaleKind
    fast_accum: bool = False

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether cuBLAS takes the shape: it reads a row of block scales by 16 bytes."""
        return outputs % 16 == 0 and inputs % (4 * GROUP if self.kind == "block" else 64) == 0

    def multiplies(self, weight: PackedWeight) -> bool:
        """Whether the weight is of the kind's scales."""
        if weight.kind != "fp8" or weight.permutation is not None:
            return False
        outputs, inputs = weight.shape
        if self.kind == "block":
            fits = weight.row_group == weight.column_group == GROUP
        else:
            fits = weight.row_group == 1 and weight.column_group >= inputs
        return fits and self.serves(1, outputs, inputs)

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        return self.product(quantize_rows(x, self.kind), weight, bias)

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """The same of rows that are quantized already, with scales of this kind."""
        assert x.kind == self.kind and self.multiplies(weight)
        if x.count == 0:
            return weight.words.new_empty((0, len(weight.words)), dtype=x.dtype)
        codes = weight.words.view(torch.float8_e4m3fn)  # [N, K]
        blocks = self.kind == "block"
        scales = weight.scales.t() if blocks else weight.scales.float()
        # cuBLAS adds no bias to products by blocks, and with fast accumulation not at all sizes.
        added = None if blocks or self.fast_accum else bias
        y = torch._scaled_mm(
            x.codes, codes.t(), x.scales, scales, added, out_dtype=x.dtype,
            use_fast_accum=self.fast_accum and not blocks,
        )[: x.count]  # fmt: skip
        return y if bias is None or added is not None else y.add_(bias)


class Scratch:
    """Memory for one dequantized weight, which layers use one after the other.

    It is allocated by the first product, which runs before a CUDA graph is captured: a graph keeps
    its address.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """elements: of the largest weight; dtype: bf16 or fp16"""
        self.elements, self.dtype, self.device = elements, dtype, device

    @cached_property
    def tensor(self) -> Tensor:
        """[elements]"""
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedGemm:
    """cuBLAS with the weight dequantized into memory."""

    scratch: Scratch

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        return outputs * inputs <= self.scratch.elements

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        outputs, inputs = weight.shape
        assert self.serves(len(x), outputs, inputs) and x.dtype == self.scratch.dtype
        plain = self.scratch.tensor[: outputs * inputs].view(outputs, inputs)
        dequantize_into(weight, plain)
        return F.linear(x, plain, bias)
