"""What the Hopper kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.layers.delta_net.inputs import DeltaNetRows, DeltaNetState

DIM, TAPS = 128, 4  # of heads, of the convolution


def _has_their_shapes(qkv: Tensor, state: DeltaNetState) -> bool:
    dims, taps = state.state.shape[2:], state.conv.shape[2] + 1
    return qkv.element_size() == 2 and tuple(dims) == (DIM, DIM) and taps == TAPS


def serves_decode(qkv: Tensor, state: DeltaNetState, rows: DeltaNetRows) -> bool:
    """Rows of one token with float32 states.  Where rows go token by token, one kernel has all of
    them, since two differ in their last bits."""
    one_token = rows.max_tokens == 1 and not rows.token_by_token
    return one_token and state.state.dtype == torch.float32 and _has_their_shapes(qkv, state)


def serves_prompts(qkv: Tensor, z: Tensor, state: DeltaNetState) -> bool:
    """TMA reads z, whose rows have to begin at multiples of 16 bytes."""
    aligned = z.data_ptr() % 16 == 0 and z.stride(0) * z.element_size() % 16 == 0
    return aligned and _has_their_shapes(qkv, state)
