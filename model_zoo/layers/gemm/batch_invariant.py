"""Batch-invariant GEMMs: results do not depend on the number of rows; nothing is autotuned."""

from __future__ import annotations

import torch
from torch import nn

from model_zoo.layers.gemm.candidates import SKINNY_CONFIGS, whole_tiles
from model_zoo.layers.gemm.implementations import BUCKETS, GemmImpl
from model_zoo.layers.linear import Linear
from model_zoo.layers.moe.experts import Experts

HEIGHT = (
    64  # rows of a weight tile: SkinnyGemm folds smaller ones, which changes the summation order
)
ALIGNED = 16  # bytes: alignment of a weight row


def use_batch_invariant_gemms(model: nn.Module) -> None:
    """Set GEMMs with one summation order for any number of rows in every Linear and all Experts.

    Call it before anything runs.  Raises ValueError for a layer with unaligned rows.
    """
    from model_zoo.layers.gemm.batch_invariant_kernel import BatchInvariantGemm
    from model_zoo.layers.quantized_gemm.dequant_gemm import DequantizeInRegistersUnsplit
    from model_zoo.layers.quantized_gemm.int8.gemm import Int8GemmByRows, activation_kind

    for name, layer in model.named_modules():
        if isinstance(layer, Experts):
            layer.use_tiles({}, batch_invariant=True)
        if not isinstance(layer, Linear):
            continue
        if layer.packed is not None:
            kind = activation_kind(layer.packed.scheme)  # sums of integers are exact in any order
            gemm = DequantizeInRegistersUnsplit() if kind is None else Int8GemmByRows(kind)
            layer.use_gemms({}, gemm, batch_invariant=True)
        else:
            outputs, inputs = layer.weight.shape
            if inputs * layer.weight.element_size() % ALIGNED:
                raise ValueError(f"{name} has rows of {inputs} numbers, not of whole 16 bytes")
            programs, few = _few_rows(layer.weight, outputs, inputs)
            layer.use_gemms(few, BatchInvariantGemm(programs), batch_invariant=True)


def _few_rows(weight: torch.Tensor, outputs: int, inputs: int) -> tuple[int, dict[int, GemmImpl]]:
    """-> (SMs of the device, GEMMs for few rows that are faster than BatchInvariantGemm)."""
    if weight.device.type != "cuda":
        return 1, {}
    properties = torch.cuda.get_device_properties(weight.device)
    programs = properties.multi_processor_count
    halves = weight.dtype in (torch.bfloat16, torch.float16)
    if (properties.major, properties.minor) != (9, 0) or not halves:
        return programs, {}
    return programs, skinny_gemms(programs, outputs, inputs)


def skinny_gemms(programs: int, outputs: int, inputs: int) -> dict[int, GemmImpl]:
    """Hopper's SkinnyGemm for each of BUCKETS, with tiles of 64 weight rows without split-K."""
    found: dict[int, GemmImpl] = {}
    for rows in BUCKETS:
        rings = next(rings for limit, rings in SKINNY_CONFIGS.items() if rows <= limit)
        block_n, block_k, stages, x_stages = next(ring for ring in rings if ring[0] == HEIGHT)
        gemm = whole_tiles(block_n, block_k, stages, x_stages, programs, outputs, inputs)
        if gemm.serves(rows, outputs, inputs):
            found[rows] = gemm
    return found
