"""OutputRing: copies of a step's tokens to the host, through a ring of pinned buffers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graph.driver import CudaEvent, CudaStream

RING = 4  # steps; two are in flight at once
ALIGNMENT = 16  # bytes: keeps pointers aligned, so that Triton specializes each kernel once


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
        tokens, usable = split_outputs(self._memory, rows)
        self._views[rows] = tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._arrived is not None:
            self._arrived.wait()


def split_outputs(memory: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """tokens [rows] int32 and usable [rows] int8 as views of the first bytes of memory."""
    first = -(-4 * rows // ALIGNMENT) * ALIGNMENT
    return memory[: 4 * rows].view(torch.int32), memory[first : first + rows].view(torch.int8)


class OutputRing:
    """The output buffer of steps of at most max_rows rows, and its ring on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._length = 5 * max_rows + ALIGNMENT
        self._memory = torch.zeros(self._length, dtype=torch.uint8, device=device)
        stream = CudaStream(device) if device.type == "cuda" else None
        self._ring = [OutputCopy(self._memory, stream) for _ in range(RING)]
        self._next = 0

    def outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """tokens, usable [rows] on the device."""
        return split_outputs(self._memory, rows)

    def fetch(self, rows: int) -> OutputCopy:
        """Queue the copy to the host.  The result is valid for RING - 1 more steps."""
        copy = self._ring[self._next]
        self._next = (self._next + 1) % RING
        copy.copy(rows, min(5 * rows + ALIGNMENT, self._length))
        return copy
