"""Launches: what each step runs, and when a graph is captured, decided once.

A launch is plain data.  Whoever runs the same launches in the same order, another GPU's process
for one, does the same work: it looks at no clock and at no free memory of its own.

No step captures a graph, since a capture would delay every row that decodes, by up to 90 ms with 36
layers: a step whose size has no graph runs in a larger one or without, whichever is predicted to be
shorter, and the missing ones are captured by launches of their own, which Engine.prepare asks for
when no request is there (docs/lab/step.md says why not beside the steps).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from msgspec import Struct

from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.scheduler.batch import Batch
from runtime.stats import GraphCounts

# Without a graph, a step is predicted to take as long as one of MAX_PADDING times its tokens, or of
# SMALL tokens, with a graph.  Up to SMALL tokens the device's time is that of reading the weights.
MAX_PADDING = 2
SMALL = 64
FITS = 4096  # sizes of steps whose buckets are known
# Free memory, besides a graph's own, below which nothing more is captured.  Steps without a graph
# need none of it: startup/memory_profile.py has run the largest, whose memory PyTorch keeps.
RESERVE_BYTES = 64 << 20

log = logging.getLogger("wavefill.graphs")


class StepLaunch(Struct, frozen=True, eq=False, tag="step"):
    """One step."""

    batch: Batch
    bucket: Bucket  # what the batch is padded to
    graph: bool  # it replays the bucket's graph
    all_hidden_states: bool  # a prompt of the batch needs those of all its tokens


class CaptureLaunch(Struct, frozen=True, tag="capture"):
    """The capture of a graph: before the first request, or while there is none."""

    bucket: Bucket


Launch = StepLaunch | CaptureLaunch


class LaunchPlanner:
    """Chooses each step's bucket, and which graph is captured next."""

    def __init__(
        self,
        buckets: Buckets,
        captured: Collection[Bucket],
        *,
        free_bytes: Callable[[], int],
        uncaptured: Iterable[Bucket],
    ) -> None:
        """captured: the buckets that have a graph, kept up to date by their owner.

        uncaptured: those that may get one; free_bytes: of the device's memory.
        """
        self.bytes_per_graph = 0  # of a graph other than the largest
        self.counts = GraphCounts()
        self._buckets, self._captured, self._free_bytes = buckets, captured, free_bytes
        self._uncaptured = set(uncaptured)
        self._best = lru_cache(FITS)(buckets.fit)
        # What `_with_graph` found for a bucket, and how many graphs there were then.
        self._larger_cache: dict[Bucket, tuple[int, Bucket]] = {}
        self._missed: Counter[Bucket] = Counter()  # steps that had no graph of their own size

    def extend(self, tokens: int) -> bool:
        """Let mixed steps of up to so many tokens have graphs, too.  False: they may already."""
        new = self._buckets.extend(tokens)
        self._best.cache_clear()
        self._uncaptured.update(new)
        return bool(new)

    def plan(
        self, batch: Batch, *, all_hidden_states: bool, has_images: bool = False
    ) -> StepLaunch:
        """The launch of a batch; has_images: tokens of it are of images."""
        longest = int(batch.q_lens.max()) if self._buckets.row_tokens > 1 else 1
        best = self._best(len(batch.tokens), len(batch.slots), longest, images=has_images)
        bucket = self._with_graph(best)
        graph = bucket in self._captured and not all_hidden_states
        if not graph:
            self.counts.steps_without += 1
        elif bucket != best:
            self.counts.steps_in_larger += 1
        if best in self._uncaptured:
            self._missed[best] += 1
        return StepLaunch(batch, bucket, graph, all_hidden_states)

    def fit(self, tokens: int, rows: int, longest: int = 1) -> Bucket:
        """The bucket that a step of this many tokens and rows is padded to; as Buckets.fit."""
        return self._with_graph(self._best(tokens, rows, longest))

    def _with_graph(self, best: Bucket) -> Bucket:
        """The bucket with which a step that fits `best` is predicted to be shortest.

        Without a graph that is `best` itself.
        """
        if best in self._captured or not self._captured:
            return best
        graphs, found = self._larger_cache.get(best, (0, best))
        if graphs != len(self._captured):
            fitting = [bucket for bucket in self._captured if _serves(bucket, best)]
            found = min(fitting, default=best)
            self._larger_cache[best] = len(self._captured), found
        return found

    def next_capture(self) -> CaptureLaunch | None:
        """The graph to capture now that there is no request."""
        if not self._uncaptured:
            return None
        sizes = {bucket: self._predicted_tokens(bucket) for bucket in self._uncaptured}

        def worth(bucket: Bucket) -> tuple[int, int, bool, int, int]:
            """Padding that the graph would save in the steps so far and in one of every size."""
            saved = sum(
                (tokens - bucket.tokens) * (1 + self._missed[size])
                for size, tokens in sizes.items()
                if bucket.tokens < tokens and _serves(bucket, size)
            )
            return saved, self._missed[bucket], bucket.decode, -bucket.tokens, -bucket.rows

        return self.take(max(self._uncaptured, key=worth))

    def _predicted_tokens(self, best: Bucket) -> int:
        """A step that fits `best` now takes as long as one of so many tokens with a graph."""
        found = self._with_graph(best)
        return found.tokens if found in self._captured else _tokens_without_graph(best)

    def take(self, bucket: Bucket, *, needs_room: bool = True) -> CaptureLaunch | None:
        """The bucket's capture if it may be captured now; it is not returned again."""
        if bucket not in self._uncaptured or (needs_room and not self._has_room()):
            return None
        self._uncaptured.remove(bucket)
        return CaptureLaunch(bucket)

    @property
    def is_complete(self) -> bool:
        """No further graph will be captured."""
        return not self._uncaptured

    def _has_room(self) -> bool:
        """Whether there is memory for another graph; if not, no further one is captured."""
        if self._free_bytes() >= RESERVE_BYTES + 2 * self.bytes_per_graph:
            return True
        log.warning("GPU memory is short: steps of %d sizes have no graph", len(self._uncaptured))
        self._uncaptured.clear()
        return False

    def give_up(self, what: str, error: RuntimeError) -> None:
        """A capture failed: steps of the buckets that have no graph yet run without."""
        log.warning(
            "%s could not be captured, %d sizes run without a graph: %s",
            *(what, len(self._uncaptured), error),
        )
        self._uncaptured.clear()


def _serves(bucket: Bucket, best: Bucket) -> bool:
    """Whether a step that fits `best` runs in a graph of `bucket` rather than without one."""
    return (
        best.tokens <= bucket.tokens <= _tokens_without_graph(best)
        and best.rows <= bucket.rows
        and (best.decode, best.images) == (bucket.decode, bucket.images)
    )


def _tokens_without_graph(best: Bucket) -> int:
    """A step without a graph is predicted to take as long as one of so many tokens with one."""
    return max(MAX_PADDING * best.tokens, SMALL)
