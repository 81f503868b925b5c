"""LatencyWindow: the latencies of the last minute, for percentiles.  Kept only while asked for."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

WINDOW_SECONDS = 60.0
KEPT_SECONDS = 5.0  # after the last keep()
PER_E = 25  # buckets for a factor of e: each is 4 % wide
SHORTEST = 1e-6


class LatencyWindow:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept_until = 0.0
        self._batches: deque[tuple[float, Counter[int]]] = deque()

    def keep(self) -> None:
        """Keep what is added in the next seconds."""
        self._kept_until = self._clock() + KEPT_SECONDS

    def add(self, seconds: Iterable[float]) -> None:
        """Any thread may call this."""
        now = self._clock()
        if now < self._kept_until:
            self._batches.append((now, Counter(map(_bucket, seconds))))

    def counts(self) -> dict[int, int]:
        """How many latencies of the last minute there are in each bucket."""
        since = self._clock() - WINDOW_SECONDS
        while self._batches and self._batches[0][0] < since:
            self._batches.popleft()
        return dict(sum((counts for _, counts in list(self._batches)), Counter[int]()))


def _bucket(seconds: float) -> int:
    return round(PER_E * math.log(max(seconds, SHORTEST)))


def percentiles(counts: Mapping[int, int], shares: Iterable[float]) -> list[float | None]:
    """Seconds below which so many of the latencies are, within 2 %; None if there are none."""
    total = sum(counts.values())
    found: list[float | None] = []
    for share in shares:
        left = share * total
        value: float | None = None
        for bucket in sorted(counts):
            value = math.exp(bucket / PER_E)
            left -= counts[bucket]
            if left <= 0:
                break
        found.append(value)
    return found
