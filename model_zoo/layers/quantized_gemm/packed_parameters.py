"""PackedParameters: the parameters of a quantized weight."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from model_zoo.layers.quantized_gemm.packed_weight import E5M3_BIAS, PackedWeight, pack
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.weight_scheme import WeightScheme


class PackedParameters(nn.Module):
    """A weight [outputs, inputs] of a scheme."""

    def __init__(self, scheme: WeightScheme, outputs: int, inputs: int) -> None:
        super().__init__()
        self.scheme = scheme
        for name, (shape, dtype) in scheme.parameters(outputs, inputs).items():
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            self.register_parameter(name, parameter)
        if scheme.permuted:  # kernels run before the weights are loaded, and this is an index
            order = self.get_parameter("permutation")
            order.copy_(torch.arange(inputs, device=order.device))
        self._has_order = False
        narrow: Tensor | None = None
        if scheme.kind == "fp8" and scheme.activation_bits == 8 and scheme.is_exact(inputs):
            narrow = torch.empty(outputs, dtype=torch.bfloat16)
        self.register_buffer("narrow_scales", narrow, persistent=False)

    @cached_property
    def weight(self) -> PackedWeight:
        """The parameters as the kernels take them, without a copy."""
        scheme, found = self.scheme, dict(self.named_parameters())
        return PackedWeight(
            kind=scheme.kind,
            words=found["words"],
            scales=found["scales"],
            row_group=scheme.row_group,
            column_group=scheme.column_group,
            zeros=found.get("zeros"),
            row_scales=found.get("row_scales"),
            permutation=found.get("permutation"),
            sums=found.get("sums"),
            narrow_scales=dict(self.named_buffers()).get("narrow_scales"),
        )

    def narrow(self) -> None:
        """Set `narrow_scales` of the weight, once it is loaded, or drop them where they would be
        rounded."""
        weight = self.weight
        if weight.narrow_scales is None:
            return
        weight.narrow_scales.copy_(weight.scales.view(-1))
        if not torch.equal(weight.narrow_scales.float(), weight.scales.view(-1)):
            self.narrow_scales = None
            self.__dict__["weight"] = replace(weight, narrow_scales=None)

    @torch.no_grad()
    def store(self, first: int, weight: QuantizedWeight) -> None:
        """Fill the rows from `first` on.

        Raises ValueError if the order of its columns is not that of the rows stored before.
        """
        self._store_order(weight.permutation)
        store_rows(self.weight, first, weight)

    def _store_order(self, permutation: Tensor | None) -> None:
        mine = self.weight.permutation
        if mine is None:
            if permutation is None:
                return
            raise ValueError("its columns are in another order, which config.json does not say")
        if permutation is None:
            permutation = torch.arange(len(mine), device=mine.device)
        if self._has_order and not torch.equal(mine, permutation):
            raise ValueError(
                "the order of its columns (act-order) is not that of the layers fused with it"
            )
        mine.copy_(permutation)
        self._has_order = True

    def release(self) -> None:
        """Free the codes, of which a GEMM has a copy in another order."""
        self.words = nn.Parameter(self.weight.words.new_empty(0), requires_grad=False)
        del self.__dict__["weight"]

    @torch.no_grad()
    def fill_randomly(self) -> None:
        """As the function."""
        fill_randomly(self.weight)


def store_rows(mine: PackedWeight, first: int, weight: QuantizedWeight) -> None:
    """Fill the rows of `mine` from `first` on, but for the order of its columns."""
    rows = pack(weight)
    last = first + len(rows.words)
    mine.words[first:last] = rows.words
    if rows.row_group > 1:
        mine.scales[first // rows.row_group :][: len(rows.scales)] = rows.scales
    else:
        mine.scales[:, first:last] = rows.scales
    if mine.zeros is not None and rows.zeros is not None:
        mine.zeros[:, first:last] = rows.zeros
    if mine.row_scales is not None and rows.row_scales is not None:
        mine.row_scales[first:last] = rows.row_scales
    if mine.sums is not None:
        mine.sums[first:last] = _sums(rows.words)


def fill_randomly(weight: PackedWeight) -> None:
    """Random codes, with scales for a standard deviation of about 0.02."""
    kind, device = weight.kind, weight.words.device
    if kind == "fp8":
        for part in weight.words.split(1 << 12):
            codes = torch.randn(len(part), 4 * part.shape[1], device=device) * 64
            part.copy_(codes.to(torch.float8_e4m3fn).view(torch.int32))
    else:
        weight.words.random_(-(1 << 31), 1 << 31)
    if kind == "fp4":
        # E5M3 1.0, or e8m0 2^-7
        weight.scales.fill_(127 - 7 if weight.row_scales is None else E5M3_BIAS << 3)
    else:
        deviation = {"fp8": 64.0, "int4": 4.6, "int8": 74.0}[kind]
        weight.scales.fill_(torch.tensor(0.02 / deviation, dtype=torch.bfloat16).item())
    if weight.row_scales is not None:
        weight.row_scales.fill_(0.02 / 2.9)
    if weight.sums is not None:
        weight.sums.copy_(_sums(weight.words))
    if weight.zeros is not None:
        weight.zeros.fill_(8 if kind == "int4" else 128)
    if weight.permutation is not None:
        weight.permutation.copy_(torch.randperm(len(weight.permutation), device=device))


def _sums(words: Tensor) -> Tensor:
    """[N] int32: of each row of int8 numbers."""
    return words.view(torch.int8).sum(1, dtype=torch.int32)
