"""Buckets: what steps are padded to, so that few CUDA graphs serve all of them.

Decode steps, in which every row has one token, have buckets of their own: they need no prefill
kernels, and there is one for every size up to 32, since the time of a small GEMM grows with each
row.

A step that computes tokens of images has a graph of its own, since it does more than one without:
mixed, and padded to as many rows as there may be, so that there is one for every number of tokens.

Steps of more than MAX_MIXED tokens have graphs where the host takes longer to launch their kernels
than the device to compute them, as for small models: four sizes for each doubling.  Up to there
padding costs less than the launches would.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

MAX_MIXED = 2048  # tokens of a graph of every model
TILE = 128  # rows of a tile of a large GEMM
# Besides the maximum, and twice as many each above: a mixed step computes the logits of every row,
# padding included.
FEW_ROWS = (32, 128, 256)
FEW_TOKENS = 512  # in a larger step, logits of fewer rows than MANY_ROWS are a small part
MANY_ROWS = 128


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

    def extend(self, tokens: int) -> list[Bucket]:
        """Let larger mixed steps, of up to so many tokens, have graphs -> their buckets."""
        before = set(self.graphs())
        sizes = large_sizes(self._max_tokens)
        self._mixed += [size for size in sizes if self._mixed[-1] < size <= tokens]
        return [bucket for bucket in self.graphs() if bucket not in before]

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
        at most the largest mixed size has one of at most twice its tokens, or of SMALL, from the
        start.
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


def large_sizes(max_tokens: int) -> list[int]:
    """Above MAX_MIXED, up to max_tokens."""
    sizes = [MAX_MIXED]
    while sizes[-1] < max_tokens:
        first = sizes[-1]
        sizes += range(first + first // 4, 2 * first + 1, first // 4)
    return _cut(sizes[1:], max_tokens)


def _cut(sizes: list[int], most: int) -> list[int]:
    """The sizes below `most`, and that."""
    return [*(size for size in sizes if size < most), most]
