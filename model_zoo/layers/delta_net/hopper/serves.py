"""What the Hopper kernels take."""

from __future__ import annotations

from torch import Tensor

from model_zoo.layers.delta_net.inputs import DeltaNetState

DIM, TAPS = 128, 4  # of heads, of the convolution


def serves_prompts(qkv: Tensor, z: Tensor, state: DeltaNetState) -> bool:
    """TMA reads z, whose rows have to begin at multiples of 16 bytes."""
    aligned = z.data_ptr() % 16 == 0 and z.stride(0) * z.element_size() % 16 == 0
    dims, taps = state.state.shape[2:], state.conv.shape[1] + 1
    served = tuple(dims) == (DIM, DIM) and taps == TAPS
    return aligned and served and qkv.element_size() == 2
