"""StepTimes: how long a step will take, learned from how long steps took.

A step's time is taken as a sum: a constant, and so much for each row that decodes, each prompt
token, each token of KV that the decoding rows read, and each pair of a prompt token with a token
before it.  The five weights are fitted to a few recent steps of every size, so that neither a long
time of decoding nor one strange step makes the rest forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAMPLES = 8  # steps remembered of each size
FIT_EVERY = 16  # steps, and only when somebody asks; the first few are fitted at once
# What makes the weights comparable, so that what is not known yet is shared between them evenly.
UNITS = np.array([1.0, 64.0, 1024.0, 65_536.0, 1_048_576.0])
RIDGE = 1e-4
FOLLOW = 0.2  # of the newest step, in what the fit is corrected by
MOST_OFF = 2.0  # that one step may count as


class StepLoad(NamedTuple):
    """What a step does, as far as its time goes."""

    rows: int  # that decode
    prompt_tokens: int
    kv_tokens: int  # read by the rows that decode
    pairs: float  # of a prompt token with those before it


class StepTimes:
    def __init__(self) -> None:
        self._weights: list[float] | None = None
        self._knows_prompts = False
        self._correction = 1.0
        # Of each size its first row in the table and how often it was noted; SAMPLES rows each.
        self._sizes: dict[tuple[int, int], list[int]] = {}
        self._table = np.zeros((64 * SAMPLES, 1 + len(UNITS)))  # seconds, then the five features
        self._noted = 0
        self._fit_at = 1  # when so many were noted

    def note(self, load: StepLoad, seconds: float) -> None:
        """A step took so long."""
        size = (load.rows.bit_length(), load.prompt_tokens.bit_length())
        entry = self._sizes.get(size)
        if entry is None:
            entry = self._sizes[size] = [self._new_rows(), 0]
        self._table[entry[0] + entry[1] % SAMPLES] = (max(seconds, 1e-6), 1.0, *load)
        entry[1] += 1
        self._noted += 1
        if load.prompt_tokens:
            self._knows_prompts = True
            expected = self._sum(self._weights, load) if self._weights is not None else 0.0
            if expected:
                off = min(max(seconds / expected, 1 / MOST_OFF), MOST_OFF) * self._correction
                self._correction += FOLLOW * (off - self._correction)

    def _new_rows(self) -> int:
        first = len(self._sizes) * SAMPLES
        if first == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        return first

    def seconds(self, load: StepLoad) -> float | None:
        """What a step should take; None before a prompt has been run."""
        weights = self._fitted()
        return None if weights is None else self._sum(weights, load)

    def _sum(self, weights: list[float], load: StepLoad) -> float:
        one, rows, tokens, kv, pairs = weights
        total = one + rows * load.rows + tokens * load.prompt_tokens
        total += kv * load.kv_tokens + pairs * load.pairs
        return total * self._correction

    def decode_seconds(self, rows: int, kv_tokens: int) -> float:
        """What a step without prompts should take; 0 before a prompt has been run."""
        return self.seconds(StepLoad(rows, 0, kv_tokens, 0.0)) or 0.0

    @property
    def per_token(self) -> float:
        """Seconds that a prompt token should add to a step; 0 before a prompt has been run."""
        weights = self._fitted()
        return weights[2] * self._correction if weights is not None else 0.0

    def prompt_tokens(self, rows: int, kv_tokens: int, context: int, seconds: float) -> int | None:
        """How many prompt tokens, after `context` others, fit into a step of so many seconds.

        None before a prompt has been run; 0 if the rows that decode take longer alone.
        """
        weights = self._fitted()
        if weights is None:
            return None
        left = seconds - self.decode_seconds(rows, kv_tokens)
        if left <= 0:
            return 0
        per_token, per_pair = weights[2] * self._correction, weights[4] * self._correction
        # per_pair / 2 * n^2 + linear * n = left
        linear = per_token + per_pair * context
        root = (linear * linear + 2 * per_pair * left) ** 0.5
        return int(2 * left / (linear + root)) if linear + root > 0 else None

    def _fitted(self) -> list[float] | None:
        """The weights, fitted again if enough was noted; None before a prompt has been run."""
        if self._noted >= self._fit_at and self._knows_prompts:
            self._fit_at = self._noted + min(self._noted, FIT_EVERY)
            self._weights = self._fit()
        return self._weights

    def _fit(self) -> list[float]:
        """Least squares of the relative error, without negative weights."""
        table = self._table[: len(self._sizes) * SAMPLES]
        table = table[table[:, 0] > 0]
        seconds = table[:, :1]
        scale = float(np.median(seconds))
        # A step that took ten times as long as it should is off by one here, not by ten.
        features = table[:, 1:] * (scale / (seconds * UNITS))
        weights = _non_negative(features.T @ features, features.sum(axis=0))
        return (weights * scale / UNITS).tolist()


def _non_negative(square: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """w >= 0 with square @ w = right, nearly: what would be negative is left out."""
    weights = np.zeros(len(right))
    used = np.flatnonzero(right > 0)
    while len(used):
        some = square[np.ix_(used, used)] + RIDGE * np.eye(len(used))
        solved = np.linalg.solve(some, right[used])
        if solved.min() >= 0:
            weights[used] = solved
            break
        used = used[solved > 0] if (solved > 0).any() else used[:0]
    return weights
