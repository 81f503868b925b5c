"""Sampling on a CPU for rows without filters or penalties: greedy, or a temperature alone.

The tokens are those of `sample_rows`, in less than half the time.  It sums weights as integers, in
UNITS of the largest; writing those of a whole vocabulary, with their cumulative sums, costs more
than the exponentials.  Here blocks of weights are summed as float64, whose error is bounded, and
only the block that the random number falls into is summed as integers.  Where the number is so
close to the edge of a token that the error could matter, one row in ten thousand, the row is
sampled exactly as `sample_rows` does it.

Rows are processed one after the other, so that each stays in the cache, and no step allocates
memory as large as its logits, which the system would have to clear.  Of rows with few allowed
tokens, as under a grammar, only the logits of these are read, for all rows at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.sampling import rows as sample_rows
from runtime.scheduler.batch import LAST, Int64Array

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
UInt8Array = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]

UNITS = np.float32(sample_rows.UNITS)
SMALL = 100_000  # logits: of fewer, the blocks take longer than exact sampling
BLOCK = 128  # weights: in units, the sum of as many is exact in a float64
MAX_ALLOWED = 1 / 64  # of the bytes of a mask: with more of them, whole rows take no longer
# [256, 8]: the bits of a byte of a mask, and the upper bound that each sets on a logit.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(-np.inf))


def sample_plain(
    logits: Float32Array,
    temperatures: Float32Array,
    numbers: Float64Array,
    sampled: BoolArray,
    masked: Int64Array,
    bits: UInt8Array,
) -> tuple[Int64Array, BoolArray]:
    """A token for each row of logits [R, vocab], LAST if no token is allowed; and whether the row
    is usable: no logit is NaN or +inf.  The token of an unusable row means nothing.

    Rows that are `sampled` [R] take temperatures [R] and numbers [R], uniform in (0, 1); others
    take the largest logit.  The rows `masked` [M] may take only the tokens set in bits [M, bytes];
    some of their other logits may be overwritten.
    """
    tokens = np.zeros(len(logits), dtype=np.int64)
    usable = np.zeros(len(logits), dtype=np.bool_)
    remaining = np.ones(len(logits), dtype=np.bool_)
    # What is far below the largest may overflow on its way to a weight of 0; greedy rows have a
    # temperature of 0; and logits that are not finite are found at the end.
    with np.errstate(all="ignore"):
        if len(masked):
            few, is_few = few_allowed_rows(masked, bits, logits.shape[-1])
            if len(few.rows):
                found = _sample_few_allowed(logits, few, temperatures, numbers, sampled)
                tokens[few.rows], usable[few.rows] = found
                remaining[few.rows] = False
            mask = TokenMask(logits.shape[-1])
            for index in np.flatnonzero(~is_few).tolist():
                mask.apply(logits[masked[index]], bits[index])
        rows = np.flatnonzero(remaining & sampled)
        if len(rows):
            tokens[rows], usable[rows] = sample_full_vocab(logits, rows, temperatures, numbers)
        rows = np.flatnonzero(remaining & ~sampled)
        if len(rows):
            tokens[rows], usable[rows] = _largest(logits, rows)
    return tokens, usable


class TokenMask:
    """Masks rows of logits [vocab]."""

    def __init__(self, vocab: int) -> None:
        self._bounds = np.empty((-(-vocab // 8), 8), dtype=np.float32)
        self._flat = self._bounds.reshape(-1)[:vocab]

    def apply(self, logits: Float32Array, bits: UInt8Array) -> None:
        """In place: -inf for tokens that are not allowed.  Token t is bit t % 8 of byte t // 8."""
        # 16 rows of 128,000 in 0.4 ms; masked_fill takes 6 where it mispredicts the next bit.
        BOUNDS.take(bits, axis=0, out=self._bounds, mode="clip")
        np.minimum(logits, self._flat, out=logits)


def _checked(tokens: Int64Array, best: Float32Array) -> tuple[Int64Array, BoolArray]:
    """The tokens of rows whose largest logits are `best`, LAST where all are -inf, so that no token
    is allowed; and which rows are usable.  NaN counts as larger than all."""
    tokens[best == -np.inf] = LAST
    return tokens, best < np.inf


def _largest(logits: Float32Array, rows: Int64Array) -> tuple[Int64Array, BoolArray]:
    """The largest logit's token of `rows` [N], ascending.  NaN counts as larger than all."""
    # A slice is no copy; the rows between are searched in vain.
    part = logits[rows[0] : rows[-1] + 1]
    # 64 rows of 32,000 in 0.09 ms on one core, where PyTorch takes 1.0.
    tokens = part.argmax(axis=-1)[rows - rows[0]]
    return _checked(tokens, logits[rows, tokens])


class FewAllowedRows(NamedTuple):
    """Rows of logits [M], in any order, and their allowed `tokens` [T]; `owners` [T] ascend and
    say which of the M rows each token belongs to."""

    rows: Int64Array
    owners: Int64Array
    tokens: Int64Array


def few_allowed_rows(
    rows: Int64Array, bits: UInt8Array, vocab: int
) -> tuple[FewAllowedRows, BoolArray]:
    """Those of `rows` [M] that masks [M, bytes] leave few tokens, and which these are [M].

    A row without any allowed token is not among them.
    """
    width = bits.shape[-1]
    if vocab % 8:
        bits = bits.copy()
        bits[:, -1] &= (1 << vocab % 8) - 1
    places = np.flatnonzero(bits != 0)
    owners = places // width
    counts = np.bincount(owners, minlength=len(rows))
    is_few = (counts > 0) & (counts <= width * MAX_ALLOWED)
    if not is_few.all():
        selected = is_few[owners]
        places, owners = places[selected], owners[selected]
        owners = (is_few.cumsum() - 1)[owners]
    which = np.flatnonzero(BITS.take(bits.reshape(-1)[places], axis=0))
    tokens = (places % width * 8)[which >> 3] + (which & 7)
    return FewAllowedRows(rows[is_few], owners[which >> 3], tokens), is_few


def _sample_few_allowed(
    logits: Float32Array,
    few: FewAllowedRows,
    temperatures: Float32Array,
    numbers: Float64Array,
    sampled: BoolArray,
) -> tuple[Int64Array, BoolArray]:
    """A token for each row of `few`, and whether it is usable, as `_checked` returns them.

    The other arguments are indexed by row of the logits [R, vocab].  Tokens are those that
    `sample_full_vocab` samples with all others at -inf: a weight of 0 changes no cumulative sum.
    """
    rows, owners, tokens = few
    counts = np.bincount(owners, minlength=len(rows))
    starts = counts.cumsum() - counts
    values = logits[rows[owners], tokens]
    best = np.maximum.reduceat(values, starts)
    weights = values - best[owners]
    largest = weights == 0
    np.divide(weights, temperatures[rows][owners], out=weights)
    np.exp(weights, out=weights)
    weights = np.where(sampled[rows][owners], weights, largest)
    reached = (weights * UNITS).astype(np.int64).cumsum()
    # Of each row alone, by differences, which are right even where the sum has overflowed.
    before = np.append(0, reached)[starts]
    total = reached[starts + counts - 1] - before
    target = (total * np.where(sampled[rows], numbers[rows], 0)).astype(np.int64)
    passed = np.add.reduceat(reached - before[owners] <= target[owners], starts, dtype=np.int64)
    return _checked(tokens[starts + np.minimum(passed, counts - 1)], best)


def sample_full_vocab(
    logits: Float32Array, rows: Int64Array, temperatures: Float32Array, numbers: Float64Array
) -> tuple[Int64Array, BoolArray]:
    """A token for each of `rows` [N] of logits [R, vocab], and whether it is usable, as `_checked`
    returns them.  temperatures [R]; numbers [R], uniform in (0, 1)."""
    temperatures, numbers = temperatures[rows], numbers[rows]
    if len(rows) * logits.shape[-1] <= SMALL:
        return _sample_rows_exactly(logits, rows, temperatures, numbers)
    sums, best = _block_sums(logits, rows, temperatures)
    tokens, usable = _checked(np.zeros(len(rows), dtype=np.int64), best)
    finite = np.isfinite(best)
    if not finite.all():
        rows, best, sums = rows[finite], best[finite], sums[finite]
        temperatures, numbers = temperatures[finite], numbers[finite]
    tokens[finite] = _locate_tokens(logits, rows, best, temperatures, numbers, sums)
    return tokens, usable


def _block_sums(
    logits: Float32Array, rows: Int64Array, temperatures: Float32Array
) -> tuple[Float64Array, Float32Array]:
    """The sums of weights by block [N, blocks] and the largest logits [N] of the rows [N]."""
    vocab = logits.shape[-1]
    padded = np.zeros(-(-vocab // BLOCK) * BLOCK, dtype=np.float32)
    weights = padded[:vocab]
    blocks = torch.from_numpy(padded).view(-1, BLOCK)
    sums = torch.empty((len(rows), len(blocks)), dtype=torch.float64)
    best = np.empty(len(rows), dtype=np.float32)
    for place, (row, out) in enumerate(zip(rows.tolist(), sums.unbind(), strict=True)):
        best[place] = largest = np.maximum.reduce(logits[row])
        _exp_weights(logits[row], largest, temperatures[place], weights)
        torch.sum(blocks, 1, dtype=torch.float64, out=out)
    return sums.numpy(), best


def _exp_weights(values: Float32Array, best: Any, temperature: Any, out: Float32Array) -> None:
    """Weights exp((value - best) / temperature), the largest of which is 1."""
    np.subtract(values, best, out=out)
    if (temperature != 1).any():
        np.divide(out, temperature, out=out)
    np.exp(out, out=out)


def _locate_tokens(
    logits: Float32Array,
    rows: Int64Array,
    best: Float32Array,
    temperatures: Float32Array,
    numbers: Float64Array,
    sums: Float64Array,
) -> Int64Array:
    """The tokens that numbers [N] select in rows [N], given the block sums [N, blocks]."""
    vocab = logits.shape[-1]
    reached = sums.cumsum(axis=-1)
    total = reached[:, -1]
    target = total * numbers
    block = (reached <= target[:, None]).sum(axis=-1)
    every = np.arange(len(rows))
    before = reached[every, block] - sums[every, block]
    columns = block[:, None] * BLOCK + np.arange(BLOCK)
    values = logits[rows[:, None], np.minimum(columns, vocab - 1)]
    _exp_weights(values, best[:, None], temperatures[:, None], values)
    if vocab % BLOCK:
        values[columns >= vocab] = 0
    inside = (values * UNITS).astype(np.int64).cumsum(axis=-1)
    rest = (target - before) * UNITS
    beyond = inside - rest[:, None]
    place = (beyond <= 0).sum(axis=-1)
    # Each weight loses less than a unit as an integer, a sum of float64 less than 2**-40 of itself.
    # Twice: both the cumulative sum and the target have this error.
    slack = 2 * (vocab + 2 + total * (UNITS * 2.0**-40))
    sure = (rest > slack) & (np.abs(beyond).min(axis=-1) > slack) & (place < BLOCK)
    tokens = columns[:, 0] + place
    for row in np.flatnonzero(~sure).tolist():
        weights = np.empty(vocab, dtype=np.float32)
        _exp_weights(logits[rows[row]], best[row], temperatures[row], weights)
        tokens[row] = _sample_exactly(weights, numbers[row])
    return tokens


def _sample_rows_exactly(
    logits: Float32Array, rows: Int64Array, temperatures: Float32Array, numbers: Float64Array
) -> tuple[Int64Array, BoolArray]:
    weights = np.empty(logits.shape[-1], dtype=np.float32)
    tokens = np.zeros(len(rows), dtype=np.int64)
    best = np.empty(len(rows), dtype=np.float32)
    for place, row in enumerate(rows.tolist()):
        best[place] = largest = np.maximum.reduce(logits[row])
        if np.isfinite(largest):
            _exp_weights(logits[row], largest, temperatures[place], weights)
            tokens[place] = _sample_exactly(weights, numbers[place])
    return _checked(tokens, best)


def _sample_exactly(weights: Float32Array, number: Any) -> int:
    cumulative = (weights * UNITS).astype(np.int64).cumsum()
    target = np.int64(cumulative[-1] * number)
    token = int(cumulative.searchsorted(target, side="right"))
    return min(token, len(weights) - 1)
