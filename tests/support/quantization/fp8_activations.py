"""What a model computes whose activations are rounded to fp8 in front of each Linear (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 448.0  # of e4m3
BLOCK = 128  # columns of a scale, where weights have a scale for each block


def rounded(x: Tensor, by_block: bool) -> Tensor:
    """x [..., K] after e4m3 with a scale for each row, or for each 128 columns of a row."""
    groups = x.unflatten(-1, (-1, BLOCK)) if by_block else x[..., None, :]
    scales = groups.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    codes = (groups.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scales).flatten(-2).to(x.dtype)


def round_activations(layers: nn.Module, by_block: bool) -> None:
    """From now on each Linear of `layers` multiplies rounded activations."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0], by_block),))
