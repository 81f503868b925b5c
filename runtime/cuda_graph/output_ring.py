"""Results: the tokens of a step on their way to the host, through pinned memory that is reused."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graph.driver import CudaEvent, CudaStream

RING = 4  # of steps, two are under way at once
ALIGNMENT = 16  # bytes: no kernel is compiled twice because a step has other rows


class OutputCopy:
    """tokens [R] int32, -1 in rows that did not sample; usable [R] int8.  Valid after wait()."""

    def __init__(self, source: Tensor, queue: CudaStream | None) -> None:
        """source: on the device, what is copied."""
        self._source, self._queue = source, queue
        self._memory = torch.zeros_like(source, device="cpu", pin_memory=queue is not None)
        self._arrived = None if queue is None else CudaEvent(queue)
        self._addresses = self._memory.data_ptr(), source.data_ptr()
        self._views: dict[int, tuple[NDArray[np.int32], NDArray[np.int8]]] = {}  # by rows
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def copy(self, rows: int, length: int) -> None:
        """Of the step's first `length` bytes."""
        self.tokens, self.usable = self._views.get(rows) or self._view(rows)
        if self._queue is None or self._arrived is None:
            self._memory[:length].copy_(self._source[:length])
            return
        self._queue.to_host(*self._addresses, length)
        self._arrived.set()

    def _view(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        tokens, usable = parts(self._memory, rows)
        self._views[rows] = tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._arrived is not None:
            self._arrived.wait()


def parts(memory: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """tokens [rows] int32 and usable [rows] int8 in bytes; the rest is not looked at."""
    first = -(-4 * rows // ALIGNMENT) * ALIGNMENT
    return memory[: 4 * rows].view(torch.int32), memory[first : first + rows].view(torch.int8)


class OutputRing:
    """What the steps of at most so many rows write, and its ring on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._length = 5 * max_rows + ALIGNMENT
        self._memory = torch.zeros(self._length, dtype=torch.uint8, device=device)
        queue = CudaStream(device) if device.type == "cuda" else None
        self._ring = [OutputCopy(self._memory, queue) for _ in range(RING)]
        self._next = 0

    def outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """tokens, usable [rows] on the device."""
        return parts(self._memory, rows)

    def fetch(self, rows: int) -> OutputCopy:
        """Queue the copy to the host.  The arrival is good for RING - 1 more steps."""
        arrival = self._ring[self._next]
        self._next = (self._next + 1) % RING
        arrival.copy(rows, min(5 * rows + ALIGNMENT, self._length))
        return arrival
