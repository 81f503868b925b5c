"""int-quantized: int8 weights with a scale for the tensor or each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.scales import check_scales, scale_per_row
from model_zoo.quantization.readers.tensor_spec import FLOATS, TensorSpec, ignored, tensor_name
from model_zoo.quantization.stored_format import StoredFormat


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    rows = shape[0]
    scale_shapes = ((), (1,), (1, 1)) if stored.strategy == "tensor" else ((rows, 1), (rows,))
    return (
        TensorSpec(("weight",), (torch.int8,), (shape,)),
        TensorSpec(("weight_scale",), FLOATS, scale_shapes),
        # Of symmetric weights they are 0.
        *ignored("weight_zero_point", "input_scale", "input_zero_point", "azp_adj"),
    )


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    scales = check_scales(tensors["weight_scale"], tensor_name(name, "weight_scale"), signed=True)
    return QuantizedWeight(
        kind="int8",
        codes=tensors["weight"].view(torch.uint8) ^ 0x80,  # + 128
        scales=scale_per_row(scales, rows),
        column_group=columns,
    )
