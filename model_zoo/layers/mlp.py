"""The feed-forward blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import fusing
from model_zoo.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202); gate and up are one product."""

    def __init__(self, size: int, inner: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * inner, bias=bias, dtype=dtype)
        self.down = Linear(inner, size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if fusing.fuses(x.device):
            from model_zoo.layers.kernels.silu_mul import silu_mul

            return self.down(silu_mul(gate_up))
        gate, up = gate_up.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MLP(nn.Module):
    """down(gelu(up(x))), gelu in its tanh form, as GPT-2 was trained."""

    def __init__(self, size: int, inner: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = Linear(size, inner, bias=True, dtype=dtype)
        self.down = Linear(inner, size, bias=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
