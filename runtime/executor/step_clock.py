"""StepClock: how long a GPU takes for each step, by its own clock.

The host reads the results of a step after it has queued the next one.  If that takes longer than
the step, as it does where the next one has images and runs without a CUDA graph, the host reads
them late, and by its clock the step would have taken the time of queueing another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

MAX_IN_FLIGHT = 4  # steps whose results have not been read; an engine has two at most


class DeviceEvent(Protocol):
    """A CUDA event with timing."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any, /) -> float: ...  # another such event


class StepClock:
    def __init__(self, pairs: Sequence[tuple[DeviceEvent, DeviceEvent]]) -> None:
        """pairs: of events, each for one step in flight; none: steps are not timed"""
        self._pairs = pairs
        self._next = 0

    @staticmethod
    def of(device: torch.device) -> StepClock:
        """Of a GPU's current stream; a CPU has none."""
        if device.type != "cuda":
            return StepClock([])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * MAX_IN_FLIGHT)]
        return StepClock(list(zip(events[::2], events[1::2], strict=True)))

    def begin(self) -> None:
        """Before anything of a step is queued: it begins then, or when the one before has ended."""
        if self._pairs:
            self._next = (self._next + 1) % len(self._pairs)
            self._pairs[self._next][0].record()

    def end(self) -> StepSpan | None:
        """When all of the step that begin() began is queued."""
        if not self._pairs:
            return None
        began, ended = self._pairs[self._next]
        ended.record()
        return StepSpan(began, ended)


class StepSpan:
    """The time of one step, until MAX_IN_FLIGHT more have begun."""

    def __init__(self, began: DeviceEvent, ended: DeviceEvent) -> None:
        self._began, self._ended = began, ended

    def seconds(self) -> float:
        """Blocks until the device has finished the step."""
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1000
