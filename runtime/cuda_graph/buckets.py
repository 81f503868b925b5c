"""Buckets: the sizes that steps are padded to, so that few CUDA graphs serve all steps.

Decode steps, in which every row has one token, have buckets of their own: they need no prefill
kernels, and there is one for every size up to 32, since the time of a small GEMM grows with each
row.  Above MAX_MIXED tokens a step keeps the device busy for longer than queueing it takes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

MAX_MIXED = 2048  # tokens of a graph
TILE = 128  # rows of a tile of a large GEMM
# Besides the maximum: a mixed step computes the logits of every row, padding included.
FEW_ROWS = (32, 128, 256)
FEW_TOKENS = 512  # in a larger step, logits of fewer rows than MANY_ROWS are a small part
MANY_ROWS = 128


class Bucket(NamedTuple):
    """What a step is padded to.  decode: every row has one token, so tokens == rows."""

    tokens: int
    rows: int
    decode: bool


class Buckets:
    """All buckets of a server with at most max_rows rows and max_tokens tokens a step."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        assert max_rows <= max_tokens
        self._max_tokens = max_tokens
        self._decode = _cut(decode_sizes(max_rows), max_rows)
        self._rows = _cut(FEW_ROWS, max_rows)
        self._mixed = _cut(mixed_sizes(), min(max_tokens, MAX_MIXED))

    @property
    def largest(self) -> list[Bucket]:
        """The largest mixed and the largest decode bucket, which set the sizes of buffers."""
        most = self._decode[-1]
        return [Bucket(self._max_tokens, most, False), Bucket(most, most, True)]

    def fit(self, tokens: int, rows: int) -> Bucket:
        """The smallest bucket for a step of this many tokens and rows."""
        if tokens == rows:
            size = self._decode[bisect_left(self._decode, rows)]
            return Bucket(size, size, True)
        if tokens > self._mixed[-1]:
            padded = min(-(-tokens // TILE) * TILE, self._max_tokens)
        else:
            padded = self._mixed[bisect_left(self._mixed, tokens)]
        rows_of = self._rows_of(padded)
        return Bucket(padded, rows_of[bisect_left(rows_of, rows)], False)

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
        return mixed[::-1] + [Bucket(size, size, True) for size in self._decode[::-1]]

    def startup_set(self) -> list[Bucket]:
        """Those of `graphs` that are captured before the first request.

        Mixed steps of all sizes: padding a long prompt to a power of two could double its time.
        Decode steps in powers of two: reading the weights takes most of their time.
        """
        sizes = {self._decode[-1], *(1 << power for power in range(9))}
        most = {tokens: self._rows_of(tokens)[-1] for tokens in self._mixed}
        return [
            bucket
            for bucket in self.graphs()
            if (bucket.tokens in sizes if bucket.decode else bucket.rows == most[bucket.tokens])
        ]


def decode_sizes(max_rows: int) -> list[int]:
    step = 16 if max_rows <= 512 else 32
    return [*range(1, 33), *range(40, 257, 8), *range(256 + step, 1024 + step, step)]


def mixed_sizes() -> list[int]:
    return [
        *(16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512),
        *range(512 + TILE, MAX_MIXED + 1, TILE),
    ]


def _cut(sizes: list[int] | tuple[int, ...], most: int) -> list[int]:
    """The sizes below `most`, and that."""
    return [*(size for size in sizes if size < most), most]
