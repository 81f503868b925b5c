"""Candidate GEMMs of quantized weights, for few rows and for many."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from model_zoo.layers.gemm.implementations import BUCKETS, GemmImpl
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.dequant_gemm import dequant_gemms, tile_of
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizedGemm, ScaledMM, Scratch
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import GROUP, QuantizedRows
from model_zoo.quantization.weight_scheme import WeightScheme

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiles:
    """DequantGemm without split-K, in the tile for the number of rows: up to 64, more than which
    dequantizing a weight into memory takes less time than once for each tile of 128 rows."""

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As GemmImpl."""
        return tile_of(x.device, len(x)).run(x, weight, bias)


def quantized_candidates(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    scheme: WeightScheme,
) -> list[GemmImpl]:
    """Candidates for x [rows, inputs] and W [outputs, inputs]; `rows` is one of BUCKETS."""
    properties = torch.cuda.get_device_properties(device)
    found: list[GemmImpl] = [
        *dequant_gemms(device, properties.multi_processor_count, rows, outputs, inputs)
    ]
    product = scaled_mm(device, dtype, outputs, inputs, scheme)
    if product is not None:
        found.append(product)
    return found


def scaled_mm(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> ScaledMM | None:
    """The fp8 product that the device has for weights of the scheme, meant for activations in fp8.

    dtype: of the activations before, and of the output
    """
    if scheme.kind != "fp8" or scheme.activation_bits != 8:
        return None
    gemm = ScaledMM("block") if scheme.row_group > 1 else ScaledMM("row", fast_accum=True)
    return gemm if gemm.serves(1, outputs, inputs) and runs(gemm, device, dtype) else None


@cache
def runs(gemm: ScaledMM, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this GPU and build of PyTorch have the product: tried on a small one.

    They differ by compute capability, dtype of the output, and version of CUDA.
    """
    if torch.cuda.get_device_capability(device) < (8, 9):
        return False
    codes = torch.zeros(512, 512, dtype=torch.float8_e4m3fn, device=device)
    blocks = torch.ones(4, 4, device=device)
    rows = torch.ones(512, 1, device=device)
    x = QuantizedRows(
        codes=codes,
        scales=torch.ones(4, 512, device=device).t() if gemm.kind == "block" else rows,
        kind=gemm.kind,
        count=512,
        dtype=dtype,
    )
    weight = PackedWeight(
        kind="fp8",
        words=codes.view(torch.int32),
        scales=blocks if gemm.kind == "block" else rows.t(),
        row_group=GROUP if gemm.kind == "block" else 1,
        column_group=GROUP if gemm.kind == "block" else 512,
    )
    try:
        gemm.product(x, weight, torch.zeros(512, dtype=dtype, device=device))
    except RuntimeError as error:  # also what is not implemented
        log.info("no fp8 product by %s scales here: %s", gemm.kind, error)
        return False
    return True


def use_quantized_gemms(model: nn.Module) -> None:
    """Set a GEMM for any number of rows in every quantized Linear, before the model runs.

    autotune_gemms finds better ones for few rows.
    """
    dequantized: list[Linear] = []
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.packed is None:
            continue
        scheme = layer.packed.scheme
        product = scaled_mm(layer.device, layer.dtype, layer.outputs, layer.inputs, scheme)
        if product is None:
            dequantized.append(layer)
        else:
            layer.use_gemms({}, product)
    if not dequantized:
        return
    largest = max(layer.outputs * layer.inputs for layer in dequantized)
    many = DequantizedGemm(Scratch(largest, dequantized[0].dtype, dequantized[0].device))
    for layer in dequantized:
        layer.use_gemms(dict.fromkeys(BUCKETS, Tiles()), many)
