"""StepTimes: how long a step will take, learned from the times of past steps.

The model of a step's time is linear: a constant, and so much for each decode row, each prompt
token, each token of KV that decode rows read, and each query-key pair of prefill attention; where
images are read, for each stage of their encoder, for the operations in it, and once if tokens of
images are among those of prompts.  The weights are fitted to a few recent steps of every size, so
that neither a long time of decoding nor an outlier displaces the rest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAMPLES_PER_SIZE = 8  # of the newest steps of each size
FIT_EVERY = 16  # steps, and only for a prediction; the first steps are fitted at once
# Make the weights comparable, so that the ridge shares unexplained time evenly between them.
FEATURE_SCALES = (1.0, 64.0, 1024.0, 65_536.0, 1_048_576.0, 16.0, 1024.0, 1.0)
RIDGE = 1e-4
CORRECTION_RATE = 0.2  # weight of the newest step in the correction of the fit
MAX_DEVIATION = 2.0  # from the prediction, as a factor, that one step may contribute
# A step measured so many times shorter than predicted had begun long before the results of the
# previous one were read: the host was late, and the time is discarded.  MAX_TOO_SHORT such steps in
# a row are believed.
TOO_SHORT = 4.0
MAX_TOO_SHORT = 3

MAX_EXTRAPOLATION = 2.0  # times the operations of the largest encoder stages measured
RECENT_STEPS = 48  # that the dashboard shows

Vector = list[float]
Float64Array = NDArray[np.float64]


class StepLoad(NamedTuple):
    """What the time of a step depends on."""

    rows: int  # decode rows, by their tokens
    prompt_tokens: int
    kv_tokens: int  # read by the decode rows
    pairs: float  # query-key pairs of the prompt tokens with those before them
    encoder_stages: int = 0
    encoder_operations: float = 0.0  # 10^9, of these stages
    has_images: int = 0  # 1: some prompt tokens are of images, whose features the step gathers


class StepTimes:
    def __init__(self) -> None:
        self._weights: Vector | None = None
        self._has_prefill = False
        self._correction = 1.0
        self.num_mixed_steps = 0  # steps with prefill since one that only decoded
        # Of steps that were predicted from earlier ones only: how many, and the sum of
        # |measured / predicted - 1|.
        self.num_predictions, self.prediction_error = 0, 0.0
        self._too_short = 0  # in a row
        self._samples: defaultdict[tuple[int, ...], deque[Vector]] = defaultdict(
            lambda: deque(maxlen=SAMPLES_PER_SIZE)
        )
        self._num_recorded = 0
        self.recent: deque[tuple[StepLoad, float]] = deque(maxlen=RECENT_STEPS)
        self._largest_stage = 0.0  # operations of the largest stages in the steps recorded
        self._fit_at = 1  # the weights are fitted once so many steps were recorded

    def record(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step of `load` that took `seconds`."""
        self.recent.append((load, seconds))
        decodes_alone = not (load.prompt_tokens or load.encoder_stages)
        self.num_mixed_steps = 0 if decodes_alone else self.num_mixed_steps + 1
        expected = self._predict(self._weights, load) if self._weights is not None else 0.0
        self._too_short = self._too_short + 1 if TOO_SHORT * seconds < expected else 0
        if 0 < self._too_short < MAX_TOO_SHORT:
            return
        if expected:
            self.num_predictions += 1
            self.prediction_error += abs(seconds / expected - 1)
        milliseconds = max(1000 * seconds, 1e-3)
        # Divided by the measured time, so that the error of a fit is relative: a step that took ten
        # times as long as predicted is off by one, not by ten.
        sample = [
            value / unit / milliseconds
            for value, unit in zip((1.0, *load), FEATURE_SCALES, strict=True)
        ]
        of_images = 2 * (load.encoder_stages > 0) + load.has_images
        operations = int(load.encoder_operations)
        size = (
            load.rows.bit_length(), load.prompt_tokens.bit_length(), of_images,
            operations.bit_length(),
        )  # fmt: skip
        self._samples[size].append(sample)
        self._num_recorded += 1
        if load.encoder_stages:
            of_stage = load.encoder_operations / load.encoder_stages
            if of_stage > MAX_EXTRAPOLATION * self._largest_stage:
                self._fit_at = self._num_recorded
            self._largest_stage = max(self._largest_stage, of_stage)
        if load.prompt_tokens:
            self._has_prefill = True
            if expected:
                deviation = min(max(seconds / expected, 1 / MAX_DEVIATION), MAX_DEVIATION)
                measured = deviation * self._correction
                self._correction += CORRECTION_RATE * (measured - self._correction)

    def seconds(self, load: StepLoad) -> float | None:
        """The predicted time of a step; None before the first step with prefill."""
        weights = self._fitted()
        return None if weights is None else self._predict(weights, load)

    def _predict(self, weights: Vector, load: StepLoad) -> float:
        one, rows, tokens, kv, pairs, stages, operations, images = weights
        total = one + rows * load.rows + tokens * load.prompt_tokens
        total += kv * load.kv_tokens + pairs * load.pairs
        total += stages * load.encoder_stages + operations * load.encoder_operations
        return (total + images * load.has_images) * self._correction

    def decode_seconds(self, rows: int, kv_tokens: int) -> float:
        """The predicted time of a step without prefill; 0 before the first step with prefill."""
        return self.seconds(StepLoad(rows, 0, kv_tokens, 0.0)) or 0.0

    @property
    def per_token(self) -> float:
        """Predicted seconds a prompt token; 0 before the first step with prefill."""
        weights = self._fitted()
        return weights[2] * self._correction if weights is not None else 0.0

    def knows_encoder(self, operations: float) -> bool:
        """Whether the time of encoder stages of so many operations each is known.

        That of a prompt token has to be known, too.  Stages that are much larger than all measured
        ones are not predicted: small ones do not show what an operation takes.
        """
        weights = self._fitted()
        if weights is None or weights[5] + weights[6] <= 0 or weights[2] <= 0:
            return False
        return operations <= MAX_EXTRAPOLATION * self._largest_stage

    @property
    def images_seconds(self) -> float:
        """What a step takes longer if some of its prompt tokens are of images; 0 if unknown."""
        weights = self._fitted()
        return 0.0 if weights is None else weights[7] * self._correction

    def encoder_tokens(self, stages: int, operations: float) -> float:
        """Prompt tokens that take as long as stages of the encoder with so many operations.

        0 before the first step with prefill, and before the first with the encoder.
        """
        weights = self._fitted()
        if weights is None or not weights[2]:
            return 0.0
        return (weights[5] * stages + weights[6] * operations) / weights[2]

    def prompt_tokens(self, rows: int, kv_tokens: int, context: int, seconds: float) -> int | None:
        """How many prompt tokens, after `context` computed ones, fit into a step of `seconds`.

        None before the first step with prefill; 0 if the decode rows alone take longer.
        """
        weights = self._fitted()
        if weights is None:
            return None
        remaining = seconds - self.decode_seconds(rows, kv_tokens)
        if remaining <= 0:
            return 0
        per_token, per_pair = weights[2] * self._correction, weights[4] * self._correction
        # per_pair / 2 * n^2 + linear * n = remaining
        linear = per_token + per_pair * context
        root = (linear * linear + 2 * per_pair * remaining) ** 0.5
        return int(2 * remaining / (linear + root)) if linear + root > 0 else None

    def parts(self) -> Vector:
        """Seconds of a step, and of each unit of StepLoad; [] before the first step with prefill.

        Their sum over the units of a load is seconds(load).
        """
        weights = self._fitted()
        return [] if weights is None else [weight * self._correction for weight in weights]

    def _fitted(self) -> Vector | None:
        """The weights, refitted when due; None before the first step with prefill."""
        if self._num_recorded >= self._fit_at and self._has_prefill:
            self._fit_at = self._num_recorded + min(self._num_recorded, FIT_EVERY)
            values = chain.from_iterable(chain.from_iterable(self._samples.values()))
            samples = np.fromiter(values, np.float64).reshape(-1, len(FEATURE_SCALES))
            fitted = _nonnegative_ridge(samples.T @ samples, samples.sum(axis=0))
            self._weights = (fitted / FEATURE_SCALES / 1000).tolist()
        return self._weights


def _nonnegative_ridge(matrix: Float64Array, rhs: Float64Array) -> Float64Array:
    """w >= 0 with matrix @ w ~ rhs: features whose weight would be negative are left out."""
    weights = np.zeros_like(rhs)
    used = rhs.nonzero()[0]
    while len(used):
        normal: Float64Array = matrix[np.ix_(used, used)]
        ridge = RIDGE * float(np.max(normal.diagonal()))
        solved = np.linalg.solve(normal + ridge * np.eye(len(used)), rhs[used])
        if solved.min() >= 0:
            weights[used] = solved
            break
        used = used[solved > 0]
    return weights
