"""The stages of prefill_hopper's tiles in shared memory, and their barriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

HALF = gl.constexpr(64)  # packed query rows of a consumer: half a tile
FIELDS = gl.constexpr(8)  # of an item
# Offsets of the barriers of Q, K, V and float8 tiles in the arrays `full` and `empty`.  Two arrays
# only, since the address of each takes a register.
AT_Q = gl.constexpr(0)
AT_K = gl.constexpr(4)
AT_V = gl.constexpr(12)
AT_FP8 = gl.constexpr(20)
BARRIERS = gl.constexpr(32)


@gluon.jit
def init_barriers(full, empty, AT: gl.constexpr, COUNT: gl.constexpr, RELEASES: gl.constexpr):
    """Barriers of COUNT stages, which RELEASES warpgroups release."""
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(AT + i), count=1)
        mbarrier.init(empty.index(AT + i), count=RELEASES)


@gluon.jit
def barrier_of(block, part: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """-> (barrier and phase of a part of block `block` of K or V).

    Stages for whole blocks have one barrier for all parts of a block, others one for each part.
    """
    SHARED: gl.constexpr = STAGES % PARTS == 0
    number = block if SHARED else block * PARTS + part
    COUNT: gl.constexpr = STAGES // PARTS if SHARED else STAGES
    return number % COUNT, (number // COUNT) & 1


@gluon.jit
def stage_of(block, part: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The stage of a part of block `block` of K or V."""
    return (block * PARTS + part) % STAGES


@gluon.jit
def await_part(
    full, block, part: gl.constexpr, AT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr
):
    """Wait for a part of block `block` of K or V -> its stage."""
    if part == 0 or STAGES % PARTS != 0:
        barrier, phase = barrier_of(block, part, PARTS, STAGES)
        mbarrier.wait(full.index(AT + barrier), phase)
    return stage_of(block, part, PARTS, STAGES)


@gluon.jit
def release(empty, block, AT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Let the stages of block `block` of K or V be filled again."""
    for part in gl.static_range(PARTS if STAGES % PARTS != 0 else 1):
        barrier, _ = barrier_of(block, part, PARTS, STAGES)
        mbarrier.arrive(empty.index(AT + barrier), count=1)
