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
def barrier_of(block, STAGES: gl.constexpr):
    """-> (barrier and phase of block `block` of K, V or float8)."""
    return block % STAGES, (block // STAGES) & 1


@gluon.jit
def stage_of(tiles, block, part: gl.constexpr, PARTS: gl.constexpr):
    """-> the index among the tiles of a part of block `block`."""
    return (block * PARTS + part) % tiles.shape[0]


@gluon.jit
def tile_of(tiles, block, part: gl.constexpr, PARTS: gl.constexpr):
    """The tile of a part of block `block`."""
    return tiles.index(stage_of(tiles, block, part, PARTS))


@gluon.jit
def await_block(full, block, AT: gl.constexpr, STAGES: gl.constexpr):
    """Wait for block `block` of K or V."""
    barrier, phase = barrier_of(block, STAGES)
    mbarrier.wait(full.index(AT + barrier), phase)


@gluon.jit
def release(empty, block, AT: gl.constexpr, STAGES: gl.constexpr):
    """Let the stage of block `block` of K or V be filled again."""
    barrier, _ = barrier_of(block, STAGES)
    mbarrier.arrive(empty.index(AT + barrier), count=1)
