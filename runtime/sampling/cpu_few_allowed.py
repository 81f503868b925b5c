"""Draws on a CPU for rows that may take few tokens, as under a grammar: nothing but the logits of
these is read, of all rows at once.  Whether the others are numbers does not matter.

The tokens are those that `sample_full_vocab` would draw after setting all others to -inf: what
weighs nothing changes no sum of the weights before a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from runtime.sampling.cpu_full_vocab import BITS, UNITS, Bits, Doubles, Flags, Singles, judged
from runtime.scheduler.batch import Int64Array

MAX_ALLOWED = 1 / 64  # of the bytes of a mask: with more of them, whole rows take no longer


class FewAllowedRows(NamedTuple):
    """Rows of logits [M], in any order, and what they may take: `owners` [T] ascend and say which
    of the M rows each of `tokens` [T] is for."""

    rows: Int64Array
    owners: Int64Array
    tokens: Int64Array


def few_allowed_rows(rows: Int64Array, bits: Bits, vocab: int) -> tuple[FewAllowedRows, Flags]:
    """Those of the `rows` [M] that may take few tokens, by masks [M, bytes], and which these are
    [M].  A row that may take none is not among them."""
    width = bits.shape[-1]
    if vocab % 8:
        bits = bits.copy()
        bits[:, -1] &= (1 << vocab % 8) - 1
    places = np.flatnonzero(bits != 0)
    owners = places // width
    counts = np.bincount(owners, minlength=len(rows))
    is_few = (counts > 0) & (counts <= width * MAX_ALLOWED)
    if not is_few.all():
        mine = is_few[owners]
        places, owners = places[mine], owners[mine]
        owners = (is_few.cumsum() - 1)[owners]
    which = np.flatnonzero(BITS.take(bits.reshape(-1)[places], axis=0))
    tokens = (places % width * 8)[which >> 3] + (which & 7)
    return FewAllowedRows(rows[is_few], owners[which >> 3], tokens), is_few


def sample_few(
    logits: Singles, few: FewAllowedRows, temperatures: Singles, numbers: Doubles, sampled: Flags
) -> tuple[Int64Array, Flags]:
    """A token for each of the rows, and whether they are usable, as `judged` says; if not, any.

    All by row of the logits [R, vocab]: temperatures, numbers uniform in (0, 1), and which rows are
    `sampled`; others take the largest logit.
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
    return judged(tokens[starts + np.minimum(passed, counts - 1)], best)
