"""Timeline: what the time from the command to the first request goes to."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timeline:
    """Phases one after the other; each ends where the next one is marked."""

    def __init__(
        self, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`began`: when the first phase did, on the clock; now if left out."""
        self._clock = clock
        self.began = self._last = clock() if began is None else began
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """What took place since the last mark was `phase`; its times are summed."""
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """From the beginning to the last mark."""
        return self._last - self.began

    def phases(self) -> list[tuple[str, float]]:
        return list(self._seconds.items())
