"""Programmatic dependent launch (PDL): a kernel's prologue overlaps the end of the one before it.

On Hopper and later a kernel may start when the CTAs of the preceding kernel have executed
griddepcontrol.launch_dependents, instead of when they have exited: its launch latency and its reads
of the plan are hidden.  It must execute griddepcontrol.wait before it touches what that kernel
writes.

Many kernels launch their dependents before they wait, so that any number of kernels may run at
once.  What makes that right:

- Every grid waits in some program, so that its end implies the end of all grids before it.
- Before one of its warps has waited, and handed that on, a CTA writes nothing and reads nothing
  that the layer has computed.  Counters and queues that are left at zero for the next launch are no
  exception.  Where a warp loads x and others write the output, x in shared memory hands it on.
- What a successor reads before its own wait must be complete when this kernel launches dependents:
  such kernels wait first, in every CTA.  The first product of experts does, whose list of tiles
  the second reads; so does decode_hopper in a mixed step.
- Plans, and keys, values and states of earlier steps, may be read before the wait: planner
  kernels do not use PDL, so that their successor starts when they and all before them are complete
  and visible (PTX ISA, griddepcontrol).

In a mixed step prefill_hopper is launched after decode_hopper, which waits first.  It needs nothing
that decode_hopper writes, so it runs, counts and writes without waiting, and waits at its end:
waiting for it implies waiting for both.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra import cuda


@triton.jit
def wait_for_launcher():
    """Wait until all preceding kernels are complete and visible, then launch dependents."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@triton.jit
def start_successor_and_wait():
    """Launch dependents, then wait until all preceding kernels are complete and visible."""
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()


@cache
def can_depend(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that has a DEPENDENT parameter and uses PDL if it is set."""
    return {"DEPENDENT": True, "launch_pdl": True} if can_depend(device) else {"DEPENDENT": False}
