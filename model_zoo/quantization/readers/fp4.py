"""fp4: e2m1 weights, two a byte, with a scale for each 16 columns (NVFP4) or 32 (MXFP4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.scales import check_scales, e8m0
from model_zoo.quantization.readers.tensor_spec import (
    FLOATS,
    Shape,
    TensorSpec,
    ignored,
    tensor_name,
)
from model_zoo.quantization.readers.unpacking import unpack_nibbles
from model_zoo.quantization.stored_format import FormatName, StoredFormat

# The suffixes of codes, scales and the second scale, if there is one.
SUFFIXES: dict[FormatName, tuple[str, str, str | None]] = {
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mxfp4-pack-quantized": ("weight_packed", "weight_scale", None),
    "mxfp4": ("_blocks", "_scales", None),
}
DIVISOR = "weight_global_scale"  # which divides; weight_scale_2 multiplies
E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    codes, scales, second = SUFFIXES[stored.name]
    groups = stored.groups(columns)
    code_shapes: list[Shape] = [(rows, -(-columns // 2))]
    if stored.name == "mxfp4":
        code_shapes.append((rows, groups, 16))
    scale_dtypes = E8M0 if second is None else (torch.float8_e4m3fn,)
    found = (
        TensorSpec((codes,), (torch.uint8,), tuple(code_shapes)),
        TensorSpec((scales,), scale_dtypes, ((rows, groups),)),
        *ignored("input_scale", "input_global_scale"),
    )
    if second is None:
        return found
    return (*found[:2], TensorSpec((second,), FLOATS, ((), (1,))), *found[2:])


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    codes, scales, second = SUFFIXES[stored.name]
    row_scales = None
    if second is not None:
        value = check_scales(tensors[second], tensor_name(name, second)).float()
        value = 1 / value if second == DIVISOR else value
        row_scales = value.reshape(1).expand(rows).contiguous()
    assert stored.group is not None
    return QuantizedWeight(
        kind="fp4",
        codes=unpack_nibbles(tensors[codes].reshape(rows, columns // 2)),
        scales=check_scales(e8m0(tensors[scales]), tensor_name(name, scales)),
        column_group=stored.group,
        row_scales=row_scales,
    )
