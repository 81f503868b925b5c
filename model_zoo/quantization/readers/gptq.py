"""gptq: 4 or 8 bits of W [K, N] in words along K, with the group of each row of W."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.act_order import group_order
from model_zoo.quantization.readers.scales import check_scales
from model_zoo.quantization.readers.tensor_spec import FLOATS, TensorSpec, ignored, tensor_name
from model_zoo.quantization.readers.unpacking import unpack_words
from model_zoo.quantization.stored_format import StoredFormat


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    groups, per_word = stored.groups(columns), 32 // stored.bits
    int32 = (torch.int32,)
    zeros = ((groups, -(-rows // per_word)),)
    return (
        TensorSpec(("qweight",), int32, ((-(-columns // per_word), rows),)),
        TensorSpec(("scales",), FLOATS, ((groups, rows),)),
        # The zero points of symmetric weights are the middle; files have others at times.
        *(ignored("qzeros") if stored.symmetric else (TensorSpec(("qzeros",), int32, zeros),)),
        TensorSpec(
            ("g_idx",), (torch.int32, torch.int64), ((columns,),), required=stored.act_order
        ),
    )


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    group = stored.group or columns
    codes = unpack_words(tensors["qweight"].t(), stored.bits)[:, :columns]  # [N, K]
    order = None
    if "g_idx" in tensors:
        g_idx = tensor_name(name, "g_idx")
        order = group_order(tensors["g_idx"], group, act_order=stored.act_order, name=g_idx)
    zeros = None
    if not stored.symmetric:
        zeros = unpack_words(tensors["qzeros"], stored.bits)[:, :rows].t().contiguous()
        # Version 1 stores one less, so that a zero point of 0 wraps around.
        zeros = (zeros + stored.zero_offset) & ((1 << stored.bits) - 1)
    scales = check_scales(tensors["scales"], tensor_name(name, "scales"), signed=True)
    return QuantizedWeight(
        kind="int4" if stored.bits == 4 else "int8",
        codes=codes.contiguous() if order is None else codes[:, order],
        scales=scales.t().contiguous(),
        zeros=zeros,
        column_group=group,
        permutation=order,
    )
