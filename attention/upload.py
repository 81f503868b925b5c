"""Host -> device, without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device: itself on a CPU, else a copy that the stream orders.

    From pageable memory the host would wait for everything queued before.  The pinned staging
    memory comes from PyTorch's caching allocator, which does not reuse it before the copy has
    happened.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
