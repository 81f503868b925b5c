# hold: a kernel of one program that takes a given time, and launches its dependents at once.
#   grid      (1)
#   reads, writes  nothing
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(nanoseconds, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        start_successor_and_wait()
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


def hold(device: torch.device, nanoseconds: int) -> None:
    """Occupy the device's current stream for so long."""
    _hold[(1,)](nanoseconds, num_warps=1, **dependent_launch(device))
