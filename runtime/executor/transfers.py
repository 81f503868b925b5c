"""Copies between host and device; on a CPU, an upload is a view and a download is complete."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.metadata import upload as upload_tensor

ALIGNMENT = 32  # bytes: keeps pointers aligned, so that Triton specializes each kernel once


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device: a view on a CPU, else a copy that the stream orders."""
    return upload_tensor(torch.from_numpy(array), device)


class PackedLayout:
    """Tensors of given types and shapes in one buffer, which one copy moves."""

    def __init__(self, *specs: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._tensors: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self.num_bytes = 0
        for dtype, shape in specs:
            self.add(dtype, shape)

    def add(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Append a tensor.  Returns its offset in the buffer, in bytes."""
        offset, length = self.num_bytes, math.prod(shape) * dtype.itemsize
        self._tensors.append((offset, offset + length, dtype, shape))
        self.num_bytes += -(-length // ALIGNMENT) * ALIGNMENT
        return offset

    def offset(self, index: int) -> int:
        """Of a tensor in the buffer, in bytes."""
        return self._tensors[index][0]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors, as views of buffer [num_bytes] uint8 on any device."""
        return [
            buffer[start:end].view(dtype).view(shape) for start, end, dtype, shape in self._tensors
        ]


class PackedUpload:
    """Host arrays that are copied to the device at once."""

    def __init__(self) -> None:
        self._layout = PackedLayout()
        self._arrays: list[NDArray[Any]] = []

    @property
    def count(self) -> int:
        """Arrays added so far."""
        return len(self._arrays)

    def add(self, array: NDArray[Any], dtype: torch.dtype = torch.int32) -> int:
        """Append a one-dimensional array, converted.  Returns its offset, in numbers of dtype."""
        self._arrays.append(array)
        return self._layout.add(dtype, array.shape) // dtype.itemsize

    def send(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """The buffer [bytes] uint8 and its arrays in order, on the device; the copy is
        asynchronous."""
        pinned = device.type == "cuda"
        num_bytes = max(self._layout.num_bytes, ALIGNMENT)
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        for target, array in zip(self._layout.views(staging), self._arrays, strict=True):
            target.numpy()[:] = array
        buffer = staging.to(device, non_blocking=True)
        return buffer, self._layout.views(buffer)


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
