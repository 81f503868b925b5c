"""Candidate GEMMs of quantized weights, for few rows and for many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from model_zoo.layers.gemm.implementations import BUCKETS, GemmImpl
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.dequant_gemm import dequant_gemms, tile_of
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizedGemm, ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.weight_scheme import WeightScheme

# Rows from which dequantizing a weight into memory takes less time than dequantizing it again for
# each tile of 128 rows.
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """DequantGemm without split-K, in the tile for the number of rows."""

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As GemmImpl."""
        return tile_of(x.device, len(x)).run(x, weight, bias)


def quantized_candidates(
    device: torch.device, rows: int, outputs: int, inputs: int, scheme: WeightScheme
) -> list[GemmImpl]:
    """Candidates for x [rows, inputs] and W [outputs, inputs]; `rows` is one of BUCKETS."""
    properties = torch.cuda.get_device_properties(device)
    found: list[GemmImpl] = [
        *dequant_gemms(device, properties.multi_processor_count, rows, outputs, inputs)
    ]
    product = scaled_mm(device, outputs, inputs, scheme)
    if product is not None:
        found.append(product)
    return found


def scaled_mm(
    device: torch.device, outputs: int, inputs: int, scheme: WeightScheme
) -> ScaledMM | None:
    """The fp8 product that the device has for weights of the scheme."""
    if scheme.kind != "fp8":
        return None
    gemm = ScaledMM("block") if scheme.row_group > 1 else ScaledMM("row", fast_accum=True)
    capability = torch.cuda.get_device_capability(device)
    runs = capability == (9, 0) if gemm.kind == "block" else capability >= (8, 9)
    return gemm if runs and gemm.serves(1, outputs, inputs) else None


def use_quantized_gemms(model: nn.Module) -> None:
    """Set a GEMM for any number of rows in every quantized Linear, before the model runs.

    autotune_gemms finds better ones for few rows.
    """
    layers = [
        (layer, layer.packed)
        for layer in model.modules()
        if isinstance(layer, Linear) and layer.packed is not None
    ]
    if not layers:
        return
    largest = max(layer.outputs * layer.inputs for layer, _ in layers)
    for layer, packed in layers:
        product = scaled_mm(layer.device, layer.outputs, layer.inputs, packed.scheme)
        if product is None:
            scratch = scratch_of(layer.device, layer.dtype, largest)
            few = dict.fromkeys((*BUCKETS, MANY_ROWS), Tiles())
            layer.use_gemms(few, DequantizedGemm(scratch))
        else:
            layer.use_gemms({}, product)


@cache
def scratch_of(device: torch.device, dtype: torch.dtype, elements: int) -> Tensor:
    """Memory for one dequantized weight, which all layers share."""
    return torch.empty(elements, dtype=dtype, device=device)
