"""What an executor announces before it does it, so that the other ranks do the same.

A step of TorchExecutor is its batch; those of GraphExecutor are launches.  Nothing else may
influence what a step computes: no clock, no free memory, no token on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from runtime.scheduler.batch import Batch, Masks


class Forward(Struct, frozen=True, eq=False, tag="forward"):
    batch: Batch


class Sampling(Struct, frozen=True, eq=False, tag="sampling"):
    """The rows of the last step are sampled."""

    sample: NDArray[np.bool_]  # those that still do
    masks: Masks | None


Announce = Callable[[object], None]
