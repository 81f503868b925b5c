"""Launches: what each step runs, decided once.

A StepLaunch is plain data.  Whoever runs the same launches in the same order, another GPU's process
for one, does the same work: it looks at no clock and at no free memory of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection

from msgspec import Struct

from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.scheduler.batch import Batch

# Padding to at most this many times the tokens is better than a step without a graph.
MAX_PADDING = 2
SMALL = 64  # tokens: up to here a step takes about the time of reading the weights
# Under load, a bucket missed MISSES times gets its graph, one every SECONDS_APART: a capture
# delays all requests, by some 90 ms with 36 layers.
MISSES = 16
SECONDS_APART = 3.0
# Free memory, besides a graph's own, below which nothing more is captured.  Steps without a graph
# need none of it: startup/memory_profile.py has run the largest, whose memory PyTorch keeps.
RESERVE_BYTES = 64 << 20

log = logging.getLogger("wavefill.graphs")


class StepLaunch(Struct, frozen=True, eq=False):
    """One step: first `capture` gets its graph, if it names a bucket, then the batch runs."""

    batch: Batch
    bucket: Bucket  # what the batch is padded to
    capture: Bucket | None
    all_hidden_states: bool  # a prompt of the batch needs those of all its tokens


class LaunchPlanner:
    """Chooses each step's bucket, and which graph is captured when."""

    def __init__(
        self,
        buckets: Buckets,
        captured: Collection[Bucket],
        *,
        free_bytes: Callable[[], int],
        uncaptured: list[Bucket],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """captured: the buckets that have a graph, kept up to date by their owner.

        uncaptured: those that may get one, the next one last; free_bytes: of the device's memory.
        """
        self.bytes_per_graph = 0  # of a graph other than the largest
        self._buckets, self._captured, self._free_bytes = buckets, captured, free_bytes
        self._uncaptured = uncaptured
        self._clock = clock
        # What `fit` found for a bucket, and how many graphs there were then.
        self._fit_cache: dict[Bucket, tuple[int, Bucket]] = {}
        self._missed: Counter[Bucket] = Counter()
        self._next_missed = 0.0  # by the clock

    def plan(self, batch: Batch, *, all_hidden_states: bool) -> StepLaunch:
        """The launch of a batch."""
        capture = self._most_missed() if self._missed else None
        bucket = self.fit(len(batch.tokens), len(batch.slots))
        return StepLaunch(batch, bucket, capture, all_hidden_states)

    def fit(self, tokens: int, rows: int) -> Bucket:
        """The bucket that a step of this many tokens and rows is padded to."""
        best = self._buckets.fit(tokens, rows)
        if best in self._captured or not self._captured:
            return best
        graphs, found = self._fit_cache.get(best, (0, best))
        if graphs != len(self._captured):
            found = self._next_larger(best)
            self._fit_cache[best] = len(self._captured), found
        # Padding the rows of a mixed step costs too little to be worth another capture.
        if best in self._uncaptured and (found.tokens > best.tokens or found == best):
            self._missed[best] += 1
        return found

    def _next_larger(self, best: Bucket) -> Bucket:
        """The smallest bucket with a graph that holds `best`; `best` itself if there is none."""
        most = max(MAX_PADDING * best.tokens, SMALL)
        fitting = [
            bucket
            for bucket in self._captured
            if best.tokens <= bucket.tokens <= most
            and best.rows <= bucket.rows
            and best.decode == bucket.decode
        ]
        return min(fitting, default=best)

    def _most_missed(self) -> Bucket | None:
        """The bucket that recent steps missed most, if it is worth the capture now."""
        if self._clock() < self._next_missed:
            return None
        [(bucket, count)] = self._missed.most_common(1)
        if count < MISSES:
            return None
        self._missed.clear()
        self._next_missed = self._clock() + SECONDS_APART
        return self.take(bucket)

    def next_capture(self) -> Bucket | None:
        """The graph to capture in an idle moment."""
        return self.take(self._uncaptured[-1]) if self._uncaptured else None

    def take(self, bucket: Bucket, *, needs_room: bool = True) -> Bucket | None:
        """The bucket if it may be captured now; it is not returned again."""
        if bucket not in self._uncaptured or (needs_room and not self._has_room()):
            return None
        self._uncaptured.remove(bucket)
        return bucket

    @property
    def is_complete(self) -> bool:
        """No further graph will be captured."""
        return not self._uncaptured

    def _has_room(self) -> bool:
        """Whether there is memory for another graph; if not, no further one is captured."""
        if self._free_bytes() >= RESERVE_BYTES + 2 * self.bytes_per_graph:
            return True
        log.warning("GPU memory is short: steps of %d sizes have no graph", len(self._uncaptured))
        self._uncaptured = []
        return False

    def give_up(self, what: str, error: RuntimeError) -> None:
        """A capture failed: steps of the buckets that have no graph yet run without."""
        log.warning(
            "%s could not be captured, %d sizes run without a graph: %s",
            *(what, len(self._uncaptured), error),
        )
        self._uncaptured = []
