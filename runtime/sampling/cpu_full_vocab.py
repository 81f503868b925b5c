"""Draws on a CPU from whole rows for what asks for no more than a temperature: the tokens that
`sample_rows` draws, in less than half the time.

The definition sums weights as integers, in UNITS of the largest.  Writing those of a
whole vocabulary, and the sum before each, costs more than the exponentials.  Here blocks of weights
are summed as float64, which is off by little that is known, and only the block that the random
number points into is summed as integers.  Where the number is so close to the edge of a token that
the error could matter, one row in ten thousand, the row is done as defined.

Rows are done one after the other, so that each stays in the cache, and no step asks for memory as
large as its logits, which the system would have to clear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.sampling import rows as sample_rows
from runtime.scheduler.batch import LAST, Int64Array

Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[np.uint8]
Flags = NDArray[np.bool_]

UNITS = np.float32(sample_rows.UNITS)
SMALL = 100_000  # logits: of fewer, locating tokens takes longer than the definition
BLOCK = 128  # weights: in units, the sum of as many is exact in a float64
# [256, 8]: the bits of a byte of a mask, and what each allows a logit to be at most.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(-np.inf))


class Limiter:
    """Keeps rows of logits [vocab] to some tokens."""

    def __init__(self, vocab: int) -> None:
        self._bounds = np.empty((-(-vocab // 8), 8), dtype=np.float32)
        self._flat = self._bounds.reshape(-1)[:vocab]

    def apply(self, logits: Singles, bits: Bits) -> None:
        """In place: -inf for what is not allowed.  Token t is bit t % 8 of byte t // 8."""
        # 16 rows of 128,000 in 0.4 ms; masked_fill takes 6 where it cannot foresee the next bit.
        BOUNDS.take(bits, axis=0, out=self._bounds, mode="clip")
        np.minimum(logits, self._flat, out=logits)


def judged(tokens: Int64Array, best: Singles) -> tuple[Int64Array, Flags]:
    """The tokens of rows whose largest logits are `best`, LAST where all are -inf, so that no token
    is allowed; and which rows are usable.  NaN counts as larger than all."""
    tokens[best == -np.inf] = LAST
    return tokens, best < np.inf


def sample_full_vocab(
    logits: Singles, rows: Int64Array, temperatures: Singles, numbers: Doubles
) -> tuple[Int64Array, Flags]:
    """A token for each of `rows` [N] of logits [R, vocab], and whether they are usable, as `judged`
    says; if not, any.  temperatures and numbers, uniform in (0, 1), are by row of the logits."""
    temperatures, numbers = temperatures[rows], numbers[rows]
    if len(rows) * logits.shape[-1] <= SMALL:
        return _sample_by_definition(logits, rows, temperatures, numbers)
    sums, best = _sums(logits, rows, temperatures)
    tokens, usable = judged(np.zeros(len(rows), dtype=np.int64), best)
    fine = np.isfinite(best)
    if not fine.all():
        rows, best, sums = rows[fine], best[fine], sums[fine]
        temperatures, numbers = temperatures[fine], numbers[fine]
    tokens[fine] = _locate(logits, rows, best, temperatures, numbers, sums)
    return tokens, usable


def _sums(logits: Singles, rows: Int64Array, temperatures: Singles) -> tuple[Doubles, Singles]:
    """Of the weights of each of the rows [N] the sums by blocks [N, blocks], and the largest logit
    [N]."""
    vocab = logits.shape[-1]
    weights = np.zeros(-(-vocab // BLOCK) * BLOCK, dtype=np.float32)
    mine = weights[:vocab]
    blocks = torch.from_numpy(weights).view(-1, BLOCK)
    sums = torch.empty((len(rows), len(blocks)), dtype=torch.float64)
    best = np.empty(len(rows), dtype=np.float32)
    for place, (row, into) in enumerate(zip(rows.tolist(), sums.unbind(), strict=True)):
        best[place] = largest = np.maximum.reduce(logits[row])
        _weigh(logits[row], largest, temperatures[place], mine)
        torch.sum(blocks, 1, dtype=torch.float64, out=into)
    return sums.numpy(), best


def _weigh(values: Singles, best: Any, temperature: Any, out: Singles) -> None:
    """Weights, the largest of which is 1."""
    np.subtract(values, best, out=out)
    if (temperature != 1).any():
        np.divide(out, temperature, out=out)
    np.exp(out, out=out)


def _locate(
    logits: Singles,
    rows: Int64Array,
    best: Singles,
    temperatures: Singles,
    numbers: Doubles,
    sums: Doubles,
) -> Int64Array:
    """The tokens of rows [N] that numbers [N] point to, given sums [N, blocks] of weights."""
    vocab = logits.shape[-1]
    every = np.arange(len(rows))
    reached = sums.cumsum(axis=-1)
    total = reached[:, -1]
    target = total * numbers
    block = (reached <= target[:, None]).sum(axis=-1)
    before = reached[every, block] - sums[every, block]
    columns = block[:, None] * BLOCK + np.arange(BLOCK)
    values = logits[rows[:, None], np.minimum(columns, vocab - 1)]
    _weigh(values, best[:, None], temperatures[:, None], values)
    if vocab % BLOCK:
        values[columns >= vocab] = 0
    inside = (values * UNITS).astype(np.int64).cumsum(axis=-1)
    rest = (target - before) * UNITS
    beyond = inside - rest[:, None]
    place = (beyond <= 0).sum(axis=-1)
    # Each weight loses less than a unit as an integer, a sum of float64 less than 2**-40 of itself.
    # Twice: what was reached is off, and so is the target.
    slack = 2 * (vocab + 2 + total * (UNITS * 2.0**-40))
    sure = (rest > slack) & (np.abs(beyond).min(axis=-1) > slack) & (place < BLOCK)
    tokens = columns[:, 0] + place
    for row in np.flatnonzero(~sure).tolist():
        weights = np.empty(vocab, dtype=np.float32)
        _weigh(logits[rows[row]], best[row], temperatures[row], weights)
        tokens[row] = _by_definition(weights, numbers[row])
    return tokens


def _sample_by_definition(
    logits: Singles, rows: Int64Array, temperatures: Singles, numbers: Doubles
) -> tuple[Int64Array, Flags]:
    weights = np.empty(logits.shape[-1], dtype=np.float32)
    tokens = np.zeros(len(rows), dtype=np.int64)
    best = np.empty(len(rows), dtype=np.float32)
    for place, row in enumerate(rows.tolist()):
        best[place] = largest = np.maximum.reduce(logits[row])
        if np.isfinite(largest):
            _weigh(logits[row], largest, temperatures[place], weights)
            tokens[place] = _by_definition(weights, numbers[place])
    return judged(tokens, best)


def _by_definition(weights: Singles, number: Any) -> int:
    cumulative = (weights * UNITS).astype(np.int64).cumsum()
    target = np.int64(cumulative[-1] * number)
    token = int(cumulative.searchsorted(target, side="right"))
    return min(token, len(weights) - 1)
