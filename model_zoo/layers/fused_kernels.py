"""Whether layers run fused Triton kernels, on CUDA, or PyTorch's operations."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def use_fused_kernels(device: torch.device) -> bool:
    """Whether the fused kernels run on the device: CUDA of capability 8.0 or more, Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
