"""Chooses between candidates of nearly the same time by the time of steps.

GEMMs and experts are timed at a start by themselves, behind a small kernel.  In a step a GEMM
stands between others: it loads its first weights while the one before it ends, shares
multiprocessors with the one after it, adds its output to the residual, and does its part of a norm.
So of those that take nearly as long by themselves another one may be the fastest there, and some
configurations differ only there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Of the fastest candidate's time: up to here another one may be faster in a step.  On H200s GEMMs
# that were, with 1 and 8 rows, had taken up to 6 % longer by themselves.
NEARLY = 1.08
MAX_CANDIDATES = 3  # that are compared, the chosen one included
# Of the step's time, and in microseconds: less is within what two measurements differ by.
BETTER, LEAST_US = 0.997, 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CloseCandidates:
    """Candidates for layers of one shape, of which the first one is in use.

    name   of the layers and their number of rows, in the file of choices
    rows   of the steps that use them
    use    sets one of them in the layers
    check  whether what the one in use computes besides its product is right; None: nothing else
    """

    name: str
    rows: int
    layers: Sequence[nn.Module]
    candidates: Sequence[Any]
    use: Callable[[Any], None]
    check: Callable[[], bool] | None = None


# Microseconds of a step of so many rows that decode, each after one of the calls, infinite where it
# cannot run; none if there is no such step, or it cannot run after the first call.
StepTimes = Callable[[int, Sequence[Callable[[], None]]], Sequence[float]]


def nearly_fastest(took: Sequence[float], better: float) -> list[int]:
    """Places in `took`: that of the fastest, if it takes less than `better` of the first one's
    time, and else the first; then those that take up to NEARLY times as long, the fastest
    first, MAX_CANDIDATES in all at most."""
    order = sorted(range(len(took)), key=took.__getitem__)
    chosen = order[0] if took[order[0]] < better * took[0] else 0
    most = min(NEARLY * took[chosen], sys.float_info.max)  # infinite: what cannot run
    close = [at for at in order if at != chosen and took[at] <= most]
    return [chosen, *close][:MAX_CANDIDATES]


def choose_in_step(
    close: Sequence[CloseCandidates],
    step_times: StepTimes,
    device: torch.device,
    *,
    seconds: float = 0.8,
    file: Path | None = None,
) -> None:
    """Use, for all layers of a shape, the candidate that makes a step the shortest.

    Steps of the fewest rows come first: of them, starts and ends of kernels take the largest part.
    Layers that are not reached keep what is in use, in later starts, too.

    seconds  after which no further comparison begins
    file     where choices are kept, as of autotune_gemms
    """
    began = time.monotonic()
    changed: dict[str, Any] = {}
    for of_shape in sorted(close, key=lambda of_shape: of_shape.rows):
        if time.monotonic() - began > seconds:
            log.debug("%s and later ones are not compared in a step: no time", of_shape.name)
            break
        uses = [partial(of_shape.use, candidate) for candidate in of_shape.candidates]
        took = step_times(of_shape.rows, uses)
        best = _shortest(took)
        uses[best]()
        if best and of_shape.check is not None and not of_shape.check():
            best = 0
            uses[best]()
        log.debug("%s: in a step %s, us %s", of_shape.name, of_shape.candidates[best], took)
        if best:
            changed[of_shape.name] = of_shape.candidates[best]
    if changed:
        from model_zoo.layers.gemm import autotune_cache  # which needs Triton

        file = autotune_cache.chosen_file() if file is None else file
        autotune_cache.write_choices(file, autotune_cache.environment_key(device), changed)


def _shortest(took: Sequence[float]) -> int:
    """The place of the least, or 0 if that is not clearly less than the first."""
    best = min(range(len(took)), key=took.__getitem__, default=0)
    if best and min(BETTER * took[0], took[0] - LEAST_US) < took[best]:
        return 0
    return best
