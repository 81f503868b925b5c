"""Copies between host and device; on a CPU, an upload is a view and a download is complete."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.metadata import upload as upload_tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device: a view on a CPU, else a copy that the stream orders."""
    return upload_tensor(torch.from_numpy(array), device)


class Download:
    """Asynchronous copies of tensors to pinned host memory.

    `wait` blocks until they are complete, and with them all work queued before.  Without tensors it
    blocks all the same: the steps of a long prompt have no outputs, and a host that ran ahead of
    them would fill the device's queue, behind which every new request would wait.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if device.type == "cuda":
            self._tensors = [_to_pinned(tensor) for tensor in tensors]
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
