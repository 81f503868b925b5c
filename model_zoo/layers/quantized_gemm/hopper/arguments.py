"""The constants that the Hopper kernels take of a packed weight's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_zoo.layers.quantized_gemm.conversions import (
    INT4_SCALED_DOWN,
    RAW_SCALED_DOWN,
    SCALED_DOWN,
    conversion,
    factors,
    may_be_raw,
)
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.quantized_weight import BITS

SYNC_ROWS = 16  # of x: of more mma.sync takes longer than wgmma
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class FormatArguments:
    by_row: bool  # scales are of rows alone
    per_block: int  # scales of a row and 128 columns
    swizzle: int  # bytes of x that lie together: of operand B of wgmma at most a step's
    constants: dict[str, Any]
    raw: bool  # codes are multiplied unconverted; zero points are taken off the sums


def format_arguments(
    weight: PackedWeight, dtype: torch.dtype, inputs: int, sync: bool, apart: bool = False
) -> FormatArguments:
    """dtype: of x; sync: products by mma.sync; apart: as of SkinnyQuantizedGemm"""
    name, scales = NAMES[dtype], weight.scales
    by_row = weight.row_group == 1 and weight.column_group >= inputs
    per_block = 0 if by_row else scales.shape[2] if scales.ndim == 3 else 1
    scaled = factors(weight.kind, name, weight.column_group)
    # Zero points of 32 columns would be taken off more sums than there are pairs of weights.
    subtract = not apart or (weight.zeros is not None and per_block > 2)
    raw = may_be_raw(weight.kind, name) and not subtract
    converted = conversion(weight.kind, name, weight.zeros is not None, scaled, raw=raw)
    factor = SCALED_DOWN[name] if scaled else 1.0
    if weight.kind == "int4" and name == "bf16":
        factor = RAW_SCALED_DOWN if raw else INT4_SCALED_DOWN
    constants = {
        "PTX": converted.ptx, "CONSTRAINTS": converted.constraints, "DTYPE": name,
        "BITS": BITS[weight.kind], "PER_BLOCK": per_block, "FACTORS": scaled, "SYNC": sync,
        "ROW_GROUP": weight.row_group, "FACTOR": factor,
    }  # fmt: skip
    swizzle = 64 if per_block == 4 and not scaled and not sync else 128
    return FormatArguments(by_row, per_block, swizzle, constants, raw)


def four_together(scales: Tensor | None, per_block: int) -> Tensor | None:
    """Scales or zero points as the kernels take them: of 8 bits as int32, if a row and 128 columns
    have 4 or 8."""
    if scales is None or scales.element_size() > 1:
        return scales
    return scales.view(torch.int32 if per_block in (4, 8) else torch.uint8)
