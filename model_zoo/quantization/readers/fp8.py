"""fp8: e4m3 weights with a scale for the tensor, each row or each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.scales import check_scales, e8m0, scale_per_row
from model_zoo.quantization.readers.tensor_spec import (
    FLOATS,
    Shape,
    TensorSpec,
    ignored,
    tensor_name,
)
from model_zoo.quantization.stored_format import StoredFormat

# In spite of its name, weight_scale_inv multiplies.
SCALES = ("weight_scale_inv", "weight_scale")


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    # float8_e8m0fnu, or the bytes of it: scales that are powers of two
    dtypes = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
    return (
        TensorSpec(("weight",), (torch.float8_e4m3fn,), (shape,)),
        TensorSpec(SCALES, dtypes, _scale_shapes(stored, shape)),
        *ignored("input_scale", "activation_scale", "input_zero_point"),
    )


def _scale_shapes(stored: StoredFormat, shape: tuple[int, int]) -> tuple[Shape, ...]:
    rows, columns = shape
    if stored.strategy == "tensor":
        return (), (1,), (1, 1)
    if stored.strategy == "channel":
        return (rows, 1), (rows,)
    assert stored.block is not None
    down, across = -(-rows // stored.block[0]), -(-columns // stored.block[1])
    return (down, across), (down, 1, across, 1)


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    suffix = next(suffix for suffix in SCALES if suffix in tensors)
    scales = check_scales(e8m0(tensors[suffix]), tensor_name(name, suffix)).float()
    codes = tensors["weight"].view(torch.uint8)
    if stored.strategy != "block":
        scales = scale_per_row(scales, rows)
        return QuantizedWeight(kind="fp8", codes=codes, scales=scales, column_group=columns)
    assert stored.block is not None
    down, across = stored.block
    return QuantizedWeight(
        kind="fp8",
        codes=codes,
        scales=scales.reshape(-(-rows // down), -(-columns // across)),
        row_group=down,
        column_group=across,
    )
