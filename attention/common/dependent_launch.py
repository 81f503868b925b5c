"""Programmatic dependent launch: a kernel starts while the one before it ends.

On Hopper and later a kernel may be launched when the programs of the kernel before it have said so,
instead of when they have finished: its launch and its reading of the plan then cost nothing.  It
must wait before it touches what that kernel writes.

Most kernels first wait and only then let their successor start, so that whatever runs knows that
all but its direct predecessor is complete.  Small kernels let it start at once: the Hopper decode
kernel copies keys and values of earlier steps while they, and what they wait for, still run.  What
a kernel does before its wait may therefore depend on nothing that the layer has computed.  Plans
may be read: a planner takes no part, so that its successor starts when all of it is complete and
visible (PTX ISA, griddepcontrol).  A planner that took part would break this.

In a mixed step prefill_hopper is launched behind decode_hopper, which waits first.  It needs
nothing that decode_hopper writes, so it works without waiting and waits in the end: whoever has
waited for it has waited for both.
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


@triton.jit
def start_successor_and_wait():
    """The next kernel may start; all before this one is complete and visible."""
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()


@cache
def can_depend(device: torch.device) -> bool:
    """Whether kernels on the device can be launched dependently."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that has a DEPENDENT parameter and waits if it is set."""
    return {"DEPENDENT": True, "launch_pdl": True} if can_depend(device) else {"DEPENDENT": False}
