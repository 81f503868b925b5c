"""Programmatic dependent launch: a kernel starts while the one before it ends.

On Hopper and later a kernel may be launched when the programs of the kernel before it have said so,
instead of when they have finished: its launch and its reading of the plan then cost nothing.  It
must wait before it touches what that kernel writes.

Every kernel that takes part first waits and only then lets its successor start.  So whatever runs
knows that all but its direct predecessor is complete, the planner among them.

A kernel that takes no part, like a planner, never lets its successor start: that starts
when all of it is complete and visible (PTX ISA, griddepcontrol), so that a plan may be read before
the wait even right after its planner.  A planner that took part would break this.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra import cuda


@triton.jit
def wait_for_launcher():
    """All before this kernel is complete and visible; the next kernel may start."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@cache
def can_depend(device: torch.device) -> bool:
    """Whether kernels on the device can be launched dependently."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that has a DEPENDENT parameter and calls wait_for_launcher."""
    return {"DEPENDENT": True, "launch_pdl": True} if can_depend(device) else {"DEPENDENT": False}
