"""What the Hopper kernels take."""

from __future__ import annotations

from torch import Tensor

from model_zoo.layers.delta_net.inputs import DeltaNetState

DIM, TAPS = 128, 4  # of heads, of the convolution


def serves_prompts(qkv: Tensor, state: DeltaNetState) -> bool:
    dims, taps = state.state.shape[2:], state.conv.shape[1]
    return tuple(dims) == (DIM, DIM) and taps == TAPS and qkv.element_size() == 2
