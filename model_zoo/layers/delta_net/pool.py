"""The pool of the recurrent states of a model's gated delta nets."""

from __future__ import annotations

import torch

from attention.state_pool import StatePool
from model_zoo.families.delta_net_config import DeltaNetConfig


def allocate_states(
    config: DeltaNetConfig,
    states: int,
    *,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> StatePool:
    """dtype: of activations, which the convolution keeps; state_dtype: of the matrices."""
    return StatePool.allocate(
        layers=len(config.layers),
        states=states,
        conv=(config.conv_width, config.conv_dim),
        matrix=(config.value_heads, config.value_dim, config.key_dim),
        conv_dtype=dtype,
        matrix_dtype=state_dtype,
        device=device,
    )
