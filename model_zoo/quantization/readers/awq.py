"""awq: 4 bits of W [K, N] in words along N, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.scales import check_scales
from model_zoo.quantization.readers.tensor_spec import FLOATS, TensorSpec, ignored, tensor_name
from model_zoo.quantization.readers.unpacking import unpack_words
from model_zoo.quantization.stored_format import StoredFormat

# Column 8 j + i of W is the four bits number NIBBLES[i] of word j.
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    groups, words = stored.groups(columns), -(-rows // 8)
    int32 = (torch.int32,)
    return (
        TensorSpec(("qweight",), int32, ((columns, words),)),
        TensorSpec(("scales",), FLOATS, ((groups, rows),)),
        # Those of symmetric weights are 8.
        *(
            ignored("qzeros")
            if stored.symmetric
            else (TensorSpec(("qzeros",), int32, ((groups, words),)),)
        ),
    )


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    rows, columns = shape
    zeros = None
    if not stored.symmetric:
        zeros = _unpack(tensors["qzeros"])[:rows].contiguous()
    scales = check_scales(tensors["scales"], tensor_name(name, "scales"), signed=True)
    return QuantizedWeight(
        kind="int4",
        codes=_unpack(tensors["qweight"])[:rows].contiguous(),
        scales=scales.t().contiguous(),
        zeros=zeros,
        column_group=stored.group or columns,
    )


def _unpack(words: Tensor) -> Tensor:
    """[K or groups, N / 8] int32 -> [N, K or groups] uint8, not contiguous."""
    codes = unpack_words(words, 4)
    order = torch.tensor(NIBBLES, device=codes.device)
    return codes.view(len(codes), -1, 8)[:, :, order].flatten(1).t()
