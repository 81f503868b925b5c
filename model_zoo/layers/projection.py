"""Projection: a linear layer of the checkpoint, which is some output features of a Linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from model_zoo.layers.quantized_gemm.packed_parameters import PackedParameters
from model_zoo.parallel.shard import Part
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.weight_scheme import WeightScheme

# Codes that are packed or dequantized at once, which takes up to 20 bytes a code for a moment.
FILLED_AT_ONCE = 1 << 24


class Run(NamedTuple):
    """Rows of a checkpoint's layer that stay together, and the first of theirs in a Linear."""

    source: int
    count: int
    target: int


class FilledLinear(Protocol):
    """A Linear, as far as its projections fill it."""

    inputs: int
    dtype: torch.dtype
    transposed: bool
    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: PackedParameters | None
    is_dequantized: bool

    @property
    def device(self) -> torch.device: ...


class LoadedProjection(Protocol):
    """A linear layer of the checkpoint, and where it belongs: a Projection, or an expert's."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def part(self) -> Part | None:
        """What the rank has of it; None: all."""
        ...

    @property
    def transposed(self) -> bool:
        """The checkpoint stores [in, out]."""
        ...

    @property
    def scheme(self) -> WeightScheme | None:
        """Of the quantized weight that it becomes part of."""
        ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    def fill(self, weight: QuantizedWeight) -> None: ...


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the checkpoint: some output features of a Linear.

    runs  where its rows go, if not in the checkpoint's order
    part  what the rank has of the checkpoint's layer; None: all
    """

    name: str
    linear: FilledLinear
    first: int
    outputs: int
    runs: tuple[Run, ...] = ()
    part: Part | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of its weight."""
        return self.outputs, self.linear.inputs

    @property
    def device(self) -> torch.device:
        return self.linear.device

    @property
    def transposed(self) -> bool:
        return self.linear.transposed

    @property
    def scheme(self) -> WeightScheme | None:
        packed = self.linear.packed
        return None if packed is None else packed.scheme

    @property
    def weight(self) -> Tensor:
        """Where an unquantized weight belongs, in the checkpoint's shape."""
        rows = self.linear.weight[self.first : self.first + self.outputs]
        return rows.T if self.linear.transposed else rows

    @property
    def bias(self) -> Tensor | None:
        bias = self.linear.bias
        return None if bias is None else bias[self.first : self.first + self.outputs]

    @torch.no_grad()
    def fill(self, weight: QuantizedWeight) -> None:
        """Store a quantized weight [outputs, inputs], dequantized if the Linear is unquantized.

        Raises ValueError as PackedParameters.store does.
        """
        linear = self.linear
        if linear.packed is None and self.runs:
            linear.is_dequantized = True
            self.copy(weight.dequantize(linear.dtype))
            return
        for run in self.runs or (Run(0, self.outputs, 0),):
            part = weight.rows(run.source, run.source + run.count)
            for begin, end in part.slices(FILLED_AT_ONCE):
                rows, first = part.rows(begin, end), self.first + run.target + begin
                if linear.packed is None:
                    linear.is_dequantized = True
                    linear.weight[first : first + end - begin] = rows.dequantize(linear.dtype)
                else:
                    linear.packed.store(first, rows)

    @torch.no_grad()
    def copy(self, weight: Tensor) -> None:
        """Store an unquantized weight [outputs, inputs] in the order of `runs`."""
        for source, count, target in self.runs:
            self.linear.weight[self.first + target :][:count] = weight[source : source + count]
