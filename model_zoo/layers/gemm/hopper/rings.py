"""Rings of buffers in shared memory that a warp fills with W and x, on Hopper (sm_90), in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """One for each slot of a ring, which so many arrivals complete; a fence has to follow."""
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, X_STAGES: gl.constexpr, RELEASES: gl.constexpr):
    """-> (w_full, x_full, empty): barriers of rings of W [STAGES] and x [X_STAGES].

    A slot of a ring is full when its copy has arrived, and empty after so many RELEASES.
    """
    found = barriers(STAGES, 1), barriers(X_STAGES, 1), barriers(STAGES, RELEASES)
    fence_async_shared()
    return found
