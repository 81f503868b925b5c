"""A buffer for histograms with frequent observations, which are counted many at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from threading import Lock
from typing import Any, cast

from prometheus_client import Histogram

MANY = 256


class BufferedHistogram:
    """Observations for one histogram: counting 256 at once costs a tenth."""

    def __init__(self, histogram: Histogram, edges: Sequence[float]) -> None:
        """`edges` are the upper bounds of the histogram's buckets, infinity left out."""
        self._histogram = histogram
        self._edges = edges
        self._numbers: list[float] = []
        self._counting = Lock()

    def add(self, number: float) -> None:
        self._numbers.append(number)
        if len(self._numbers) >= MANY:
            self.count()

    def count(self) -> None:
        """Flush all observations to the histogram.  Any thread may call this."""
        with self._counting:
            numbers = self._numbers.copy()
            if not numbers:
                return
            counts = [0] * (len(self._edges) + 1)
            for number in numbers:
                counts[bisect_left(self._edges, number)] += 1
            _observe_many(self._histogram, counts, sum(numbers))
            del self._numbers[: len(numbers)]  # others may have been added meanwhile


def _observe_many(histogram: Histogram, counts: Sequence[int], total: float) -> None:
    """Histogram.observe for many numbers: how many of them in each bucket, and their sum."""
    # Not in the API of the library; test_metrics.py compares it with observe().
    inside = cast(Any, histogram)
    for bucket, count in zip(inside._buckets, counts, strict=True):
        if count:
            bucket.inc(count)
    inside._sum.inc(total)
