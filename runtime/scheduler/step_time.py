"""StepTimes: how long a step will take, learned from how long steps took.

A step's time is taken as a sum: a constant, and so much for each row that decodes, each prompt
token, each token of KV that the decoding rows read, and each pair of a prompt token with a token
before it.  The five weights are fitted to a few recent steps of every size, so that neither a long
time of decoding nor one strange step makes the rest forgotten.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SAMPLES = 8  # steps remembered of each size
FIT_EVERY = 16  # steps, and only when somebody asks; the first few are fitted at once
# What makes the weights comparable, so that what is not known yet is shared between them evenly.
UNITS = (1.0, 64.0, 1024.0, 65_536.0, 1_048_576.0)
RIDGE = 1e-4
FOLLOW = 0.2  # of the newest step, in what the fit is corrected by
MAX_DEVIATION = 2.0  # that one step may count as
# A step that took so many times less than it should had begun long before the results of the one
# before it were read: the host was late, and the time is nobody's.  Often in a row it is believed.
TOO_SHORT = 4.0
IN_A_ROW = 3
PLACES = range(len(UNITS))

Vector = list[float]


class StepLoad(NamedTuple):
    """What a step does, as far as its time goes."""

    rows: int  # that decode
    prompt_tokens: int
    kv_tokens: int  # read by the rows that decode
    pairs: float  # of a prompt token with those before it


class StepTimes:
    def __init__(self) -> None:
        self._weights: Vector | None = None
        self._knows_prompts = False
        self._correction = 1.0
        self.mixed_in_a_row = 0  # steps that fed prompts, since one that only decoded
        self._too_short = 0  # in a row
        self._samples: dict[tuple[int, int], deque[Vector]] = {}
        self._fresh: dict[tuple[int, int], int] = {}  # how many of them the sums have not yet
        # Of all other samples: their products with each other, and their sum.
        self._square = [[0.0] * len(UNITS) for _ in PLACES]
        self._right = [0.0] * len(UNITS)
        self._noted = 0
        self._fit_at = 1  # when so many were noted

    def record(self, load: StepLoad, seconds: float) -> None:
        """A step took so long."""
        self.mixed_in_a_row = self.mixed_in_a_row + 1 if load.prompt_tokens else 0
        expected = self._sum(self._weights, load) if self._weights is not None else 0.0
        self._too_short = self._too_short + 1 if TOO_SHORT * seconds < expected else 0
        if 0 < self._too_short < IN_A_ROW:
            return
        milliseconds = max(1000 * seconds, 1e-3)
        # Divided by the time that they should add up to: a step that took ten times as long as it
        # should is off by one, not by ten.
        sample = [
            value / unit / milliseconds for value, unit in zip((1.0, *load), UNITS, strict=True)
        ]
        size = (load.rows.bit_length(), load.prompt_tokens.bit_length())
        ring = self._samples.setdefault(size, deque())
        ring.append(sample)
        fresh = self._fresh.get(size, 0) + 1
        if len(ring) > SAMPLES:
            oldest = ring.popleft()
            if fresh <= SAMPLES:
                self._add(oldest, -1.0)
        self._fresh[size] = min(fresh, SAMPLES)
        self._noted += 1
        if load.prompt_tokens:
            self._knows_prompts = True
            if expected:
                off = (
                    min(max(seconds / expected, 1 / MAX_DEVIATION), MAX_DEVIATION)
                    * self._correction
                )
                self._correction += FOLLOW * (off - self._correction)

    def _add_fresh(self) -> None:
        """Steps that only decode go on for long without anybody who asks: they are added late."""
        for size, fresh in self._fresh.items():
            for sample in list(self._samples[size])[-fresh:]:
                self._add(sample, 1.0)
        self._fresh.clear()

    def _add(self, sample: Vector, sign: float) -> None:
        right = self._right
        for place, row in enumerate(self._square):
            value = sign * sample[place]
            if value:
                right[place] += value
                for other in PLACES:
                    row[other] += value * sample[other]

    def seconds(self, load: StepLoad) -> float | None:
        """What a step should take; None before a prompt has been run."""
        weights = self._fitted()
        return None if weights is None else self._sum(weights, load)

    def _sum(self, weights: Vector, load: StepLoad) -> float:
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

    def _fitted(self) -> Vector | None:
        """The weights, fitted again if enough was noted; None before a prompt has been run."""
        if self._noted >= self._fit_at and self._knows_prompts:
            self._fit_at = self._noted + min(self._noted, FIT_EVERY)
            self._add_fresh()
            fitted = _non_negative(self._square, self._right)
            self._weights = [
                weight / unit / 1000 for weight, unit in zip(fitted, UNITS, strict=True)
            ]
        return self._weights


def _non_negative(square: list[Vector], right: Vector) -> Vector:
    """w >= 0 with square @ w = right, nearly: what would be negative is left out."""
    weights = [0.0] * len(right)
    used: list[int] = [place for place in PLACES if right[place] > 0]
    while used:
        ridge = RIDGE * max(square[place][place] for place in used)
        solved = _solve(
            [[square[i][j] + ridge * (i == j) for j in used] for i in used],
            [right[place] for place in used],
        )
        if min(solved) >= 0:
            for place, value in zip(used, solved, strict=True):
                weights[place] = value
            break
        used = [place for place, value in zip(used, solved, strict=True) if value > 0]
    return weights


def _solve(rows: list[Vector], right: Vector) -> Vector:
    """x with rows @ x = right, for a matrix that is symmetric and positive definite."""
    size = len(rows)
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            right[below] -= factor * right[pivot]
            for column in range(pivot, size):
                rows[below][column] -= factor * rows[pivot][column]
    solved = [0.0] * size
    for place in reversed(range(size)):
        known = sum(rows[place][column] * solved[column] for column in range(place + 1, size))
        solved[place] = (right[place] - known) / rows[place][place]
    return solved
