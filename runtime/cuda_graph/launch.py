"""Launches: what each step runs, and when a graph is captured, decided once.

A launch is plain data.  Whoever runs the same launches in the same order, another GPU's process
for one, does the same work: it looks at no clock and at no free memory of its own.

No step captures a graph, since a capture would delay every row that decodes, by up to 90 ms with 36
layers: a step whose size has no graph runs in a larger one or without, whichever is predicted to be
shorter, and the missing ones are captured by launches of their own, which Engine.prepare asks for
when no request is there (docs/lab/step.md says why not beside the steps).

Steps are padded to buckets, so that few CUDA graphs serve all of them.  Decode steps, in which
every row has one token, have buckets of their own: they need no prefill kernels, and there is one
for every size up to 32, since the time of a small GEMM grows with each row.  Above MAX_MIXED tokens
a step keeps the device busy for longer than queueing it takes.

A step that computes tokens of images has a graph of its own, since it does more than one without:
mixed, and padded to as many rows as there may be, so that there is one for every number of tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from msgspec import Struct

from runtime.scheduler.batch import Batch
from runtime.stats import GraphCounts

MAX_MIXED = 2048  # tokens of a graph
TILE = 128  # rows of a tile of a large GEMM
# Besides the maximum, and twice as many each above: a mixed step computes the logits of every row,
# padding included.
FEW_ROWS = (32, 128, 256)
FEW_TOKENS = 512  # in a larger step, logits of fewer rows than MANY_ROWS are a small part
MANY_ROWS = 128
# Without a graph, a step is predicted to take as long as one of MAX_PADDING times its tokens, or of
# SMALL tokens, with a graph.  Up to SMALL tokens the device's time is that of reading the weights.
MAX_PADDING = 2
SMALL = 64
# Free memory, besides a graph's own, below which nothing more is captured.  Steps without a graph
# need none of it: startup/memory_profile.py has run the largest, whose memory PyTorch keeps.
RESERVE_BYTES = 64 << 20

log = logging.getLogger("wavefill.graphs")


class Bucket(NamedTuple):
    """What a step is padded to.

    decode: all rows have as many tokens as a decode row may have; images: some are of images
    """

    tokens: int
    rows: int
    decode: bool
    images: bool = False

    @property
    def row_tokens(self) -> int:
        """The most tokens that a row has."""
        return self.tokens // self.rows if self.decode else self.tokens


class Buckets:
    """All buckets of a server with at most max_rows rows and max_tokens tokens a step.

    row_tokens: tokens of a decode row, more than one with speculative decoding
    images: the model reads them
    """

    def __init__(
        self, max_rows: int, max_tokens: int, row_tokens: int = 1, *, images: bool = False
    ) -> None:
        assert max_rows * row_tokens <= max_tokens
        self._max_tokens, self.row_tokens, self._images = max_tokens, row_tokens, images
        self._decode = _cut(decode_sizes(max_rows), max_rows)
        self._rows = _cut(mixed_rows(max_rows), max_rows)
        self._mixed = _cut(mixed_sizes(), min(max_tokens, MAX_MIXED))

    @property
    def largest(self) -> list[Bucket]:
        """The largest mixed and the largest decode bucket, which set the sizes of buffers."""
        most = self._decode[-1]
        return [Bucket(self._max_tokens, most, False), self._decode_bucket(most)]

    def fit(self, tokens: int, rows: int, longest: int = 1, *, images: bool = False) -> Bucket:
        """The smallest bucket for a step of this many tokens and rows.

        longest: the tokens of the row with the most, if decode rows may have more than one
        images: tokens are of images
        """
        alike = tokens == rows * self.row_tokens and longest <= self.row_tokens
        if alike and not images:
            return self._decode_bucket(self._decode[bisect_left(self._decode, rows)])
        if tokens > self._mixed[-1]:
            padded = min(-(-tokens // TILE) * TILE, self._max_tokens)
        else:
            padded = self._mixed[bisect_left(self._mixed, tokens)]
        rows_of = self._rows_of(padded)
        if images:
            return Bucket(padded, rows_of[-1], False, images=True)
        return Bucket(padded, rows_of[bisect_left(rows_of, rows)], False)

    def _decode_bucket(self, rows: int) -> Bucket:
        return Bucket(rows * self.row_tokens, rows, True)

    def _rows_of(self, tokens: int) -> list[int]:
        """The row counts that mixed steps of this many tokens are padded to."""
        rows = _cut(self._rows, min(self._rows[-1], tokens))
        many = tokens > FEW_TOKENS
        return [count for count in rows if not many or count >= min(MANY_ROWS, rows[-1])]

    def graphs(self) -> list[Bucket]:
        """All buckets with a graph, the largest first: smaller ones then reuse its memory."""
        mixed = [
            Bucket(tokens, rows, False) for tokens in self._mixed for rows in self._rows_of(tokens)
        ]
        images = [self.fit(tokens, 1, images=True) for tokens in self._mixed if self._images]
        decode = [self._decode_bucket(size) for size in self._decode]
        buckets = mixed[::-1] + images[::-1] + decode[::-1]
        return sorted(buckets, key=lambda bucket: -max(bucket.tokens, MAX_MIXED))

    def startup_set(self) -> list[Bucket]:
        """Those of `graphs` that are captured before the first request.

        Mixed steps of all sizes: padding a long prompt to a power of two could double its time.
        Decode steps in powers of two: reading the weights takes most of their time.  So a step of
        at most MAX_MIXED tokens has one of at most twice its tokens, or of SMALL, from the start.
        Steps with images have none yet: a start takes as long as that of a model of text.
        """
        most_rows = self._decode[-1]
        sizes = {most_rows, *(1 << power for power in range(most_rows.bit_length()))}
        most = {tokens: self._rows_of(tokens)[-1] for tokens in self._mixed}
        return [
            bucket
            for bucket in self.graphs()
            if not bucket.images
            and (bucket.rows in sizes if bucket.decode else bucket.rows == most[bucket.tokens])
        ]


def decode_sizes(max_rows: int) -> list[int]:
    """Above 1024 rows, 16 sizes up to twice as many, and so on."""
    step = 16 if max_rows <= 512 else 32
    sizes = [*range(1, 33), *range(40, 257, 8), *range(256 + step, 1024 + step, step)]
    while sizes[-1] < max_rows:
        first = sizes[-1]
        sizes += range(first + first // 16, 2 * first + 1, first // 16)
    return sizes


def mixed_rows(max_rows: int) -> list[int]:
    sizes: list[int] = [*FEW_ROWS]
    while sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    return sizes


def mixed_sizes() -> list[int]:
    return [
        *(16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512),
        *range(512 + TILE, MAX_MIXED + 1, TILE),
    ]


def _cut(sizes: list[int], most: int) -> list[int]:
    """The sizes below `most`, and that."""
    return [*(size for size in sizes if size < most), most]


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
        # What `_with_graph` found for a bucket, and how many graphs there were then.
        self._larger_cache: dict[Bucket, tuple[int, Bucket]] = {}
        self._missed: Counter[Bucket] = Counter()  # steps that had no graph of their own size

    def plan(
        self, batch: Batch, *, all_hidden_states: bool, has_images: bool = False
    ) -> StepLaunch:
        """The launch of a batch; has_images: tokens of it are of images."""
        longest = int(batch.q_lens.max()) if self._buckets.row_tokens > 1 else 1
        best = self._buckets.fit(len(batch.tokens), len(batch.slots), longest, images=has_images)
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
        return self._with_graph(self._buckets.fit(tokens, rows, longest))

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
