"""The activations between the two products of an expert."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from model_zoo.moe_config import CLAMP_ALPHA, CLAMP_LIMIT, Activation


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * I], gates before ups -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu_mul":
        return F.silu(gate) * up
    if activation == "gelu_tanh_mul":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * gate * (CLAMP_ALPHA * gate).sigmoid()
