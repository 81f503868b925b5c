"""y = x W^T + b of a PackedWeight by cuBLAS: in fp8, or in bf16 after dequantizing the weight.

For many rows, where cuBLAS is limited by its arithmetic and the passes before it are small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import GemmImpl
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import (
    GROUP,
    QuantizedRows,
    QuantizedRowsGemm,
    ScaleKind,
    UnscaledGemm,
    UnscaledRows,
)


@dataclass(frozen=True, slots=True)
class ScaledMM(QuantizedRowsGemm):
    """torch._scaled_mm of weights of kind fp8, with activations in fp8.

    kind        "row": scales of rows of x and of W; compute capability 8.9 or more.
                "block": 1 x 128 of x, 128 x 128 of W; compute capability 9.0
    fast_accum  sums of fewer bits on the tensor cores; of kind "row" only
    """

    name = "fp8 tensor cores"
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
        """As QuantizedRowsGemm.product."""
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


@dataclass(frozen=True, slots=True)
class UnscaledMM(UnscaledGemm):
    """torch._scaled_mm of the codes alone, whose scales the kernel after it multiplies.

    For scales of rows cuBLAS has one kernel with one size of tiles, and many where there is one
    scale for all: an H200 takes 2.5 ms in place of 3.4 for all GEMMs of Qwen3-8B and 128 rows.
    """

    name = "fp8 tensor cores, scaled by the next kernel"
    kind: ScaleKind = "row"

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K] -> x W^T [M, N]; no bias."""
        return self.product(quantize_rows(x, self.kind), weight, bias)

    def unscaled(self, x: Tensor | QuantizedRows, weight: PackedWeight) -> UnscaledRows:
        """As UnscaledGemm.unscaled, in bf16: sums of codes may be larger than fp16 can be."""
        x = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        assert x.kind == self.kind and ScaledMM(self.kind).multiplies(weight)
        assert x.dtype == torch.bfloat16
        codes = weight.words.view(torch.float8_e4m3fn)  # [N, K]
        if x.count == 0:
            values = codes.new_empty((0, len(codes)), dtype=x.dtype)
        else:
            one = _one(codes.device)
            values = torch._scaled_mm(
                x.codes, codes.t(), one, one, None, out_dtype=x.dtype, use_fast_accum=True
            )[: x.count]
        narrow = weight.narrow_scales
        return UnscaledRows(values, x.scales, weight.scales.view(-1) if narrow is None else narrow)


@cache
def _one(device: torch.device) -> Tensor:
    """A scale.  The first call is not in the capture of a CUDA graph, whose memory it would be of:
    autotuning and the start's compilation run the GEMM before."""
    return torch.ones(1, 1, device=device)


@dataclass(frozen=True, slots=True)
class DequantizeThenCublas:
    """cuBLAS with the weight dequantized into memory that all layers share."""

    name = "dequantize then cuBLAS"

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        outputs, inputs = weight.shape
        plain = scratch(x.device, x.dtype, outputs * inputs).view(outputs, inputs)
        dequantize_into(weight, plain)
        return F.linear(x, plain, bias)


_largest: dict[tuple[torch.device, torch.dtype], int] = {}  # elements of the largest weight


def reserve_scratch(device: torch.device, dtype: torch.dtype, elements: int) -> None:
    """Let scratch() have so many elements from its first use on, which allocates them.

    That is before a CUDA graph is captured: a graph keeps its address.
    """
    _largest[device, dtype] = max(_largest.get((device, dtype), 0), elements)


def scratch(device: torch.device, dtype: torch.dtype, elements: int) -> Tensor:
    """[elements]: memory for one dequantized weight, which layers use one after the other."""
    most = max(_largest.get((device, dtype), 0), elements)
    return _allocated(device, dtype, most)[:elements]


def release_scratch(gemms: Iterable[GemmImpl | None]) -> None:
    """Free that memory if none of a model's GEMMs needs it: choosing them may have allocated it."""
    if not any(isinstance(gemm, DequantizeThenCublas) for gemm in gemms):
        _allocated.cache_clear()


@cache
def _allocated(device: torch.device, dtype: torch.dtype, elements: int) -> Tensor:
    return torch.empty(elements, dtype=dtype, device=device)
