"""Which work a program of the Hopper kernels of experts has, and the copies of it, in Gluon.

A tile is ROWS rows of one expert's weight times at most WIDTH rows of x of tokens that chose the
expert; a unit is a run of columns of it.  A program has every num_programs-th tile, and each
expert's tiles are consecutive, so that programs read neighbouring memory at the same time.  In
SPLITS places of the list are the same tiles, each with an equal part of the columns.

    entry           where a tile is in the list, and what of an expert's weight it has
    of_weights, of_rows_of_x    the same, for the warps that load
    of_expert       where an expert's scales are
    copy_weights    the copies of a unit's pieces, by TMA
    copy_rows       the copy of a unit's columns of x
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from model_zoo.layers.quantized_gemm.hopper.scales import HEIGHT, elements, prefetch
from model_zoo.moe_config import MAX_EXPERTS

EXPERTS = gl.constexpr(MAX_EXPERTS)


@gluon.jit
def count_tiles(
    NUM_TILES, row_tiles, SINGLE: gl.constexpr, TOP_K: gl.constexpr, SPLITS: gl.constexpr
):
    """Tiles of the program; reads that bypass L1, as all of the list (dependent_launch.py)."""
    tiles = TOP_K * SPLITS * row_tiles
    if not SINGLE:
        tiles = gl.load(NUM_TILES, cache_modifier=".cg") * row_tiles
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def entry(TILES, i, row_tiles, SPLITS: gl.constexpr):
    """Tile i of the program -> (place in the list, tile of W's rows, expert, its how-manieth)."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    place = tile // row_tiles
    word = gl.load(TILES + place // SPLITS, cache_modifier=".cg")
    return place, tile % row_tiles, word % EXPERTS, word // EXPERTS


@gluon.jit
def of_weights(TILES, i, row_tiles, SPLITS: gl.constexpr):
    """Tile i of the program -> (tile of W's rows, expert, part of the columns)."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    place = tile // row_tiles
    word = gl.load(TILES + place // SPLITS, cache_modifier=".cg")
    return tile % row_tiles, word % EXPERTS, place % SPLITS


@gluon.jit
def of_rows_of_x(
    TILE_ROWS, i, row_tiles, SINGLE: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr
):
    """Tile i of the program -> (its first row of x, part of the columns).

    One token has a single row, and as many inner ones as experts.
    """
    place = (gl.program_id(0) + i * gl.num_programs(0)) // row_tiles
    if SINGLE:
        row = place * 0 if GATED else place // SPLITS
    else:
        row = gl.load(TILE_ROWS + place, cache_modifier=".cg")
    return row, place % SPLITS


@gluon.jit
def of_expert(
    SCALES, expert, outputs, scale_blocks, PER_BLOCK: gl.constexpr, ROW_GROUP: gl.constexpr
):
    """Its scales, or zero points."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    rows = gl.cdiv(outputs, ROW_GROUP)
    return SCALES + expert.to(gl.int64) * (rows * scale_blocks * EACH)


@gluon.jit
def copy_weights(
    w_desc, weights, full, SCALES, ZEROS, expert, row_tile, block, stage, outputs, inner,
    scale_blocks, BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a unit of an expert's weight, and ask for its scales."""
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    PIECES: gl.constexpr = HEIGHT // ROWS  # of a warpgroup: gates and ups, or one
    mbarrier.expect(full.index(stage), GROUPS * PIECES * w_desc.block_type.nbytes)
    column = block * w_desc.block_type.shape[1]
    for p in gl.static_range(GROUPS * PIECES):
        row = (row_tile * GROUPS + p // PIECES) * ROWS + p % PIECES * inner
        tma.async_copy_global_to_shared(
            w_desc, [expert * outputs + row, column], full.index(stage),
            weights.index(stage * GROUPS + p // PIECES).slice(p % PIECES * ROWS, ROWS, 0),
        )  # fmt: skip
        if PER_BLOCK > 0:
            mine = of_expert(SCALES, expert, outputs, scale_blocks, PER_BLOCK, 1)
            prefetch(mine, row, block * BLOCKS, outputs, scale_blocks, ROWS, BLOCKS, PER_BLOCK)
        if ZEROS is not None:
            mine = of_expert(ZEROS, expert, outputs, scale_blocks, PER_BLOCK, 1)
            prefetch(mine, row, block * BLOCKS, outputs, scale_blocks, ROWS, BLOCKS, PER_BLOCK)


@gluon.jit
def copy_rows(x_desc, rows, full, row, block, stage):
    mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        x_desc, [row, block * x_desc.block_type.shape[1]], full.index(stage), rows.index(stage)
    )
