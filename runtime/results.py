"""Results: the tokens of a step on their way to the host, through pinned memory that is reused."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING = 4  # of steps, two are under way at once
ALIGNMENT = 16  # bytes: no kernel is compiled twice because a step has other rows


class Arrival:
    """tokens [R] int32, -1 in rows that did not sample; usable [R] int8.  Valid after wait()."""

    def __init__(self, memory: Tensor, on_gpu: bool) -> None:
        self._memory = memory
        self._arrived = torch.cuda.Event(blocking=True) if on_gpu else None
        self._views: dict[int, tuple[Tensor, NDArray[np.int32], NDArray[np.int8]]] = {}
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def copy(self, source: Tensor, rows: int) -> None:
        host, self.tokens, self.usable = self._views.get(rows) or self._view(rows, len(source))
        host.copy_(source, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _view(self, rows: int, length: int) -> tuple[Tensor, NDArray[np.int32], NDArray[np.int8]]:
        tokens, usable = parts(self._memory, rows)
        self._views[rows] = self._memory[:length], tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()


def parts(memory: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """tokens [rows] int32 and usable [rows] int8 in bytes; the rest is not looked at."""
    first = -(-4 * rows // ALIGNMENT) * ALIGNMENT
    return memory[: 4 * rows].view(torch.int32), memory[first : first + rows].view(torch.int8)


class Results:
    """What the steps of at most so many rows write, and its ring on the host."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._length = 5 * most_rows + ALIGNMENT
        self._memory = torch.zeros(self._length, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._ring = [
            Arrival(torch.zeros(self._length, dtype=torch.uint8, pin_memory=on_gpu), on_gpu)
            for _ in range(RING)
        ]
        self._next = 0

    def outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """tokens, usable [rows] on the device."""
        return parts(self._memory, rows)

    def fetch(self, rows: int) -> Arrival:
        """Queue the copy to the host.  The arrival is good for RING - 1 more steps."""
        arrival = self._ring[self._next]
        self._next = (self._next + 1) % RING
        arrival.copy(self._memory[: min(5 * rows + ALIGNMENT, self._length)], rows)
        return arrival
