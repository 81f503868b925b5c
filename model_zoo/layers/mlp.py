"""MLP blocks: SwiGLU, and GPT-2's GELU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.linear import Linear
from model_zoo.layers.normed_rows import Norm, NormOutput
from model_zoo.layers.quantized_rows import Consumer, ScaleKind
from model_zoo.layers.swiglu_linear import SwigluLinear


class SwigluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202), or with gelu; gate and up are one Linear."""

    def __init__(self, gate_up: SwigluLinear, down: Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def input_scales(self, rows: int) -> ScaleKind | None:
        """As Linear.input_scales."""
        return self.gate_up.input_scales(rows)

    def takes_normed(self, rows: int) -> bool:
        """As Consumer.takes_normed."""
        return self.gate_up.takes_normed(rows)

    def multiply_first(self, x: NormOutput) -> object:
        """As Consumer.multiply_first."""
        return self.gate_up.swiglu(x, consumer=self.down)

    @property
    def loads_ahead(self) -> bool:
        """As Consumer.loads_ahead."""
        return self.gate_up.loads_ahead

    def add(self, x: NormOutput, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """x, residual [T, size] -> (output or None, residual), as Linear.add."""
        return self.down.add(self.gate_up.swiglu(x, consumer=self.down), residual)

    def for_norm(self, x: NormOutput) -> Addend:
        """x [T, size] -> [T, size], as Linear.for_norm."""
        return self.down.for_norm(self.gate_up.swiglu(x, consumer=self.down))

    def forward(self, x: NormOutput) -> Tensor:
        """x [T, size] -> [T, size]."""
        return self.down(self.gate_up.swiglu(x, consumer=self.down))


def link_mlps(
    layers: Sequence[Any] | nn.ModuleList, first_norm: Callable[[Any], tuple[Norm, Consumer]]
) -> None:
    """Tell the last GEMM of each SwigluMLP, a layer's `mlp`, which norm follows.

    first_norm  of a layer, and what takes that norm's output; none follows the last layer
    """
    for layer, following in zip_longest(layers, layers[1:]):
        if not isinstance(layer.mlp, SwigluMLP):
            continue
        if following is None:
            layer.mlp.down.precedes_nothing()
        else:
            layer.mlp.down.precedes(*first_norm(following))


class MLP(nn.Module):
    """down(gelu(up(x))) with the tanh approximation of gelu, as in GPT-2."""

    def __init__(self, up: Linear, down: Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
