"""OutputRing: copies of a step's tokens to the host, through a ring of pinned buffers."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graph.driver import CudaEvent, CudaStream
from runtime.executor.transfers import PackedLayout

RING = 4  # steps; two are in flight at once


class OutputCopy:
    """tokens [R] int32, -1 in rows that did not sample; usable [R] int8.  Valid after wait()."""

    def __init__(self, source: Tensor, stream: CudaStream | None) -> None:
        """source: the output buffer on the device."""
        self._source, self._stream = source, stream
        self._memory = torch.zeros_like(source, device="cpu", pin_memory=stream is not None)
        self._arrived = None if stream is None else CudaEvent(stream)
        self._addresses = self._memory.data_ptr(), source.data_ptr()
        self._views: dict[int, tuple[NDArray[np.int32], NDArray[np.int8]]] = {}  # by rows
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def copy(self, rows: int, length: int) -> None:
        """Queue the copy of the first `length` bytes, the outputs of `rows` rows."""
        self.tokens, self.usable = self._views.get(rows) or self._view(rows)
        if self._stream is None or self._arrived is None:
            self._memory[:length].copy_(self._source[:length])
            return
        self._stream.to_host(*self._addresses, length)
        self._arrived.set()

    def _view(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        tokens, usable = output_layout(rows).views(self._memory)
        self._views[rows] = tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._arrived is not None:
            self._arrived.wait()


@cache
def output_layout(rows: int) -> PackedLayout:
    """tokens [rows] int32 and usable [rows] int8"""
    return PackedLayout((torch.int32, (rows,)), (torch.int8, (rows,)))


class OutputRing:
    """The output buffer of steps of at most max_rows rows, and its ring on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        num_bytes = output_layout(max_rows).num_bytes
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        stream = CudaStream(device) if device.type == "cuda" else None
        self._ring = [OutputCopy(self._memory, stream) for _ in range(RING)]
        self._next = 0

    def outputs(self, rows: int) -> list[Tensor]:
        """tokens, usable [rows] on the device."""
        return output_layout(rows).views(self._memory)

    def fetch(self, rows: int) -> OutputCopy:
        """Queue the copy to the host.  The result is valid for RING - 1 more steps."""
        copy = self._ring[self._next]
        self._next = (self._next + 1) % RING
        copy.copy(rows, output_layout(rows).num_bytes)
        return copy
