"""StackedParameters: the quantized weights of all experts, in one tensor for each parameter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.quantized_gemm.packed_parameters import fill_randomly, store_rows
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.quantized_weight import BITS, QuantizedWeight
from model_zoo.quantization.weight_scheme import BLOCK, WeightScheme


class StackedParameters(nn.Module):
    """Weights [experts, outputs, inputs] of a scheme.

    Columns are padded to a multiple of BLOCK, since the packed order has whole blocks.
    """

    def __init__(self, scheme: WeightScheme, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        assert not scheme.permuted, "columns of x would differ from expert to expert"
        self.columns = -(-inputs // BLOCK) * BLOCK
        per_row = scheme.row_group == 1 and scheme.column_group >= inputs
        self.scheme = replace(scheme, column_group=self.columns) if per_row else scheme
        for name, (shape, dtype) in self.scheme.parameters(outputs, self.columns).items():
            room = torch.empty((experts, *shape), dtype=dtype)
            self.register_parameter(name, nn.Parameter(room, requires_grad=False))

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def stack(self) -> PackedWeight:
        """The parameters [E, ...] in the fields of a PackedWeight, as the kernels take them."""
        return self._view({name: part.data for name, part in self.named_parameters()})

    def of(self, expert: int) -> PackedWeight:
        """One expert's weight, without a copy."""
        return self._view({name: part.data[expert] for name, part in self.named_parameters()})

    def _view(self, parts: dict[str, Tensor]) -> PackedWeight:
        return PackedWeight(
            kind=self.scheme.kind,
            words=parts["words"],
            scales=parts["scales"],
            row_group=self.scheme.row_group,
            column_group=self.scheme.column_group,
            zeros=parts.get("zeros"),
            row_scales=parts.get("row_scales"),
        )

    @torch.no_grad()
    def store(self, expert: int, first: int, weight: QuantizedWeight) -> None:
        """Fill rows of an expert from `first` on."""
        store_rows(self.of(expert), first, pad_columns(weight, self.columns))

    @torch.no_grad()
    def fill_randomly(self) -> None:
        """As PackedParameters.fill_randomly."""
        for expert in range(len(self.stack().words)):
            fill_randomly(self.of(expert))


def pad_columns(weight: QuantizedWeight, columns: int) -> QuantizedWeight:
    """The weight with more columns, `columns` in all; what they hold is multiplied by zeros."""
    used = weight.shape[1]
    per_row = weight.row_group == 1 and weight.column_group >= used
    if used == columns:
        return weight
    middle = 1 << (BITS[weight.kind] - 1) if weight.kind in ("int4", "int8") else 0
    codes = F.pad(weight.codes, (0, columns - used), value=middle)
    if per_row:
        return replace(weight, codes=codes, column_group=columns)
    more = -(-columns // weight.column_group) - weight.scales.shape[1]
    # Scales of 8 bits are padded as their bits.
    wide = weight.scales.dtype.itemsize > 1
    scales = weight.scales if wide else weight.scales.view(torch.uint8)
    scales = F.pad(scales, (0, more)).view(weight.scales.dtype)
    zeros = None if weight.zeros is None else F.pad(weight.zeros, (0, more), value=middle)
    return replace(weight, codes=codes, scales=scales, zeros=zeros)
