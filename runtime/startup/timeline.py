"""Timeline: the seconds of each phase from the command to readiness."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timeline:
    """Consecutive phases; each is marked at its end."""

    def __init__(
        self, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """began: the start of the first phase, on the clock; None: now."""
        self._clock = clock
        self.began = self._last = clock() if began is None else began
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`."""
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """From the start to the last mark."""
        return self._last - self.began

    def phases(self) -> list[tuple[str, float]]:
        return list(self._seconds.items())
