"""The warps of prefill_hopper that convert K and V of float8_e4m3fn pages.

To float16, exactly: it has float8's range, as bfloat16 has, and the hardware converts two elements
in one instruction, where bfloat16 takes several.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attention.common.hopper import cta_barrier
from attention.prefill.prefill_hopper_stages import AT_FP8, AT_K, AT_V, barrier_of, tile_of


@gluon.jit
def _convert_block(
    stored, tiles, full, empty, number, block,
    AT: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Convert block `block` of K or V, which is number `number` of the float8 blocks of both."""
    STAGES: gl.constexpr = tiles.shape[0] // PARTS
    BLOCK_D: gl.constexpr = tiles.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [gl.num_warps(), 1], [1, 0]
    )
    source, source_phase = barrier_of(number, STAGES)
    barrier, phase = barrier_of(block, STAGES)
    mbarrier.wait(full.index(AT_FP8 + source), source_phase)
    mbarrier.wait(empty.index(AT + barrier), phase ^ 1)
    for part in gl.static_range(PARTS):
        source_tile = tile_of(stored, number, part, PARTS)
        tile = tile_of(tiles, block, part, PARTS)
        for j in gl.static_range(tiles.shape[1] // ROWS):
            x = source_tile.slice(j * ROWS, ROWS, 0).load(layout)
            tile.slice(j * ROWS, ROWS, 0).store(x.to(tiles.dtype))
    fence_async_shared()
    cta_barrier()  # every warp has converted its elements
    mbarrier.arrive(empty.index(AT_FP8 + source), count=1)
    mbarrier.arrive(full.index(AT + barrier), count=1)


@gluon.jit
def _is_end(last, full, number, PARTS: gl.constexpr):
    """Wait for float8 block `number` -> 1 if the producer sent the end in its place."""
    barrier, phase = barrier_of(number, last.shape[0] // PARTS)
    mbarrier.wait(full.index(AT_FP8 + barrier), phase)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(last.index(barrier).load(one), 0)


@gluon.jit
def convert(buffers, float8, full, empty, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """The converting warps: float8 blocks of K and V in turn become blocks of float16.

    ROWS: of a tile, converted at a time
    """
    _, keys, values, _ = buffers
    stored, last = float8
    block = 0
    while _is_end(last, full, 2 * block, PARTS) == 0:
        _convert_block(stored, keys, full, empty, 2 * block, block, AT_K, PARTS, ROWS)
        _convert_block(stored, values, full, empty, 2 * block + 1, block, AT_V, PARTS, ROWS)
        block += 1
