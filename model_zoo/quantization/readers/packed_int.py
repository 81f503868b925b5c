"""pack-quantized of compressed-tensors: 4 or 8 bits in words along K, codes plus their middle."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.json_fields import ModelError
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.act_order import group_order
from model_zoo.quantization.readers.scales import check_scales
from model_zoo.quantization.readers.tensor_spec import (
    FLOATS,
    Shape,
    TensorSpec,
    ignored,
    tensor_name,
)
from model_zoo.quantization.readers.unpacking import unpack_words
from model_zoo.quantization.stored_format import StoredFormat


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    groups, per_word = stored.groups(columns), 32 // stored.bits
    scales: list[Shape] = [(rows, groups)]
    if stored.strategy == "channel":
        scales.append((rows,))
    zeros = ((-(-rows // per_word), groups),)  # packed along N
    return (
        TensorSpec(("weight_packed",), (torch.int32,), ((rows, -(-columns // per_word)),)),
        TensorSpec(("weight_scale",), FLOATS, tuple(scales)),
        *(
            ignored("weight_zero_point")
            if stored.symmetric
            else (TensorSpec(("weight_zero_point",), (torch.int32,), zeros),)
        ),
        TensorSpec(("weight_shape",), (torch.int64, torch.int32), ((2,),), required=False),
        TensorSpec(
            ("weight_g_idx",),
            (torch.int32, torch.int64),
            ((columns,),),
            required=stored.act_order,
        ),
        *ignored("input_scale", "input_zero_point"),
    )


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, columns]:
        raise ModelError(
            f"{tensor_name(name, 'weight_shape')} is {tensors['weight_shape'].tolist()}, and the "
            f"model needs {[rows, columns]}: they belong to different models, download both again"
        )
    group = stored.group or columns
    codes = unpack_words(tensors["weight_packed"], stored.bits)[:, :columns]
    zeros = None
    if not stored.symmetric:
        packed = tensors["weight_zero_point"].t()
        zeros = unpack_words(packed, stored.bits)[:, :rows].t().contiguous()
    order = None
    if "weight_g_idx" in tensors:
        order = group_order(
            tensors["weight_g_idx"],
            group,
            act_order=stored.act_order,
            name=tensor_name(name, "weight_g_idx"),
        )
    scales = check_scales(tensors["weight_scale"], tensor_name(name, "weight_scale"), signed=True)
    return QuantizedWeight(
        kind="int4" if stored.bits == 4 else "int8",
        codes=codes.contiguous() if order is None else codes[:, order],
        scales=scales.reshape(rows, stored.groups(columns)),
        zeros=zeros,
        column_group=group,
        permutation=order,
    )
