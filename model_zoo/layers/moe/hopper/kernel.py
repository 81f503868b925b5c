"""The two products of experts of few tokens on Hopper (sm_90), in Gluon.

_experts_product: two warps load, one or two warpgroups compute, as in quantized_gemm's
skinny_hopper.py, but of whole tiles (tile_list.py) whose weights are those of an expert.
  grid      as many programs as the device holds; each has the same number of tiles, or one more
  SINGLE    one token: the list of tiles is its ids; otherwise align() has made one, and put the
            rows of x in the order of the experts, so that a tile's rows are consecutive
  SPLITS    of the second product of one token: parts of the columns, each with tiles of its own
  GATED     the first product: tiles of 32 gates and their 32 ups for each warpgroup; writes inner
            values in the order of the experts.  It waits for the preceding kernel first
  else      the second: fills its ring of weights before it waits, by the list that was complete
            when the first product began; writes the weighted output of each pair of a token and an
            expert.  Of one token the last program to arrive at a tile adds those of the experts and
            splits, in their order; of several sum_pairs.py does
  products  quantized_gemm/hopper/multiply.py; unquantized weights by wgmma from shared memory
  reads     W [E * N, K], or its words; scales, zeros and row scales [E, ...]; bias [E, N] or None.
            Rows of x that belong to no token of the expert are multiplied and not stored
  bound     memory: the weights of the chosen experts
  checked   tests/model_zoo/layers/moe/test_hopper_experts.py, interpreted and on a GPU
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model_zoo.layers.gemm.hopper.rings import ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import wait_for_room
from model_zoo.layers.moe.hopper.epilogue import (
    add_rows,
    weighted,
    write_inner,
    write_pairs,
    write_row,
)
from model_zoo.layers.moe.hopper.tile_list import (
    copy_rows,
    copy_weights,
    count_tiles,
    entry,
    of_expert,
    of_rows_of_x,
    of_weights,
)
from model_zoo.layers.quantized_gemm.hopper.convert import columns_layout
from model_zoo.layers.quantized_gemm.hopper.multiply import multiply, sums_layout
from model_zoo.layers.quantized_gemm.hopper.scales import (
    HEIGHT,
    SCALE_COLUMNS,
    elements,
    of_rows,
)

LOAD_REGISTERS = gl.constexpr(56)  # of the loading warps' threads


@gluon.jit
def _load_weights(
    w_desc, weights, w_full, empty, SCALES, ZEROS, TILES, NUM_TILES, outputs, inner, k_blocks,
    row_tiles, ahead, scale_blocks, BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr,
    SINGLE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, SPLITS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights: for the first product once the list of tiles is complete."""
    if DEPENDENT:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    count = count_tiles(NUM_TILES, row_tiles, SINGLE, TOP_K, SPLITS) * k_blocks
    expert, row_tile, part = 0, 0, 0
    for i in range(count):
        if i % k_blocks == 0:
            row_tile, expert, part = of_weights(TILES, i // k_blocks, row_tiles, SPLITS)
        wait_for_room(w_full, empty, i, ahead, STAGES)
        copy_weights(
            w_desc, weights, w_full, SCALES, ZEROS, expert, row_tile,
            part * k_blocks + i % k_blocks, i % STAGES, outputs, inner, scale_blocks, BLOCKS,
            PER_BLOCK, GROUPS,
        )  # fmt: skip


@gluon.jit
def _load_rows(
    x_desc, rows, x_full, empty, TILE_ROWS, NUM_TILES, k_blocks, row_tiles, SINGLE: gl.constexpr,
    GATED: gl.constexpr, TOP_K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads rows of x."""
    X_STAGES: gl.constexpr = rows.shape[0]
    if DEPENDENT:
        gdc_wait()
    count = count_tiles(NUM_TILES, row_tiles, SINGLE, TOP_K, SPLITS) * k_blocks
    row, part = 0, 0
    for i in range(count):
        if i % k_blocks == 0:
            row, part = of_rows_of_x(TILE_ROWS, i // k_blocks, row_tiles, SINGLE, GATED, SPLITS)
        if i >= X_STAGES:  # a unit of both is released by the barrier of W's
            before = i - X_STAGES
            mbarrier.wait(empty.index(before % STAGES), (before // STAGES) & 1)
        copy_rows(x_desc, rows, x_full, row, part * k_blocks + i % k_blocks, i % X_STAGES)


@gluon.jit
def _rows_of(row_tile, r, inner, outputs, GATED: gl.constexpr, GROUPS: gl.constexpr,
             group: gl.constexpr):  # fmt: skip
    """Rows r of a warpgroup's part of a tile -> rows of the expert's weight, all of which exist."""
    if GATED:
        HALF: gl.constexpr = HEIGHT // 2
        gate = (row_tile * GROUPS + group) * HALF + r % HALF
        n = gl.minimum(gate, inner - 1) + r // HALF * inner
    else:
        n = gl.minimum((row_tile * GROUPS + group) * HEIGHT + r, outputs - 1)
    return n


@gluon.jit
def _of_unit(
    SCALES, expert, row_tile, block, outputs, inner, scale_blocks,
    BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr, ROW_GROUP: gl.constexpr, GATED: gl.constexpr,
    GROUPS: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """A unit's scales, or zero points, of the warpgroup's rows."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    layout: gl.constexpr = columns_layout(BLOCKS * EACH, EACH)
    r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    n = _rows_of(row_tile, r, inner, outputs, GATED, GROUPS, group)
    return of_rows(
        of_expert(SCALES, expert, outputs, scale_blocks, PER_BLOCK, ROW_GROUP), n,
        r * 0 + block * BLOCKS, outputs, scale_blocks, BLOCKS, EACH, ROW_GROUP,
    )  # fmt: skip


@gluon.jit
def _compute(
    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, BIAS, TILES, TILE_ROWS,
    TILE_COUNTS, NUM_TILES, PAIRS, SCORES, PARTS, ARRIVED, SHARED, SHARED_GATE, OUT, tokens,
    outputs, inner, k_blocks, row_tiles, scale_blocks, PTX: gl.constexpr,
    CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr,
    FACTORS: gl.constexpr, SYNC: gl.constexpr, ROW_GROUP: gl.constexpr, FACTOR: gl.constexpr,
    ACTIVATION: gl.constexpr, SINGLE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
    SPLITS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
    group: gl.constexpr,
):  # fmt: skip
    """A warpgroup: products of its rows of the units, and the epilogue of each tile."""
    X_STAGES: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    BLOCKS: gl.constexpr = rows.shape[2] // SCALE_COLUMNS
    layout: gl.constexpr = sums_layout(WIDTH, SYNC)
    if DEPENDENT and GATED:
        gdc_wait()
    count = count_tiles(NUM_TILES, row_tiles, SINGLE, TOP_K, SPLITS) * k_blocks
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    scales, zeros = None, None
    place, row_tile, expert, number = entry(TILES, 0, row_tiles, SPLITS)
    expert = gl.where(count > 0, expert, 0)  # beyond the list is anything
    if PER_BLOCK > 0:
        scales = _of_unit(
            SCALES, expert, row_tile, place % SPLITS * k_blocks, outputs, inner, scale_blocks,
            BLOCKS, PER_BLOCK, ROW_GROUP, GATED, GROUPS, group,
        )  # fmt: skip
    if ZEROS is not None:
        zeros = _of_unit(
            ZEROS, expert, row_tile, place % SPLITS * k_blocks, outputs, inner, scale_blocks,
            BLOCKS, PER_BLOCK, ROW_GROUP, GATED, GROUPS, group,
        )  # fmt: skip
    tile, block = 0, 0
    for i in range(count):
        stage = i % STAGES
        next_block = block + 1
        next_place, next_row_tile, next_expert, next_number = place, row_tile, expert, number
        if next_block == k_blocks:
            next_block = 0
            tile += 1
            if i + 1 < count:
                next_place, next_row_tile, next_expert, next_number = entry(
                    TILES, tile, row_tiles, SPLITS
                )
        next_unit = next_place % SPLITS * k_blocks + next_block
        if PER_BLOCK > 0:
            next_scales = _of_unit(
                SCALES, next_expert, next_row_tile, next_unit, outputs, inner,
                scale_blocks, BLOCKS, PER_BLOCK, ROW_GROUP, GATED, GROUPS, group,
            )  # fmt: skip
        if ZEROS is not None:
            next_zeros = _of_unit(
                ZEROS, next_expert, next_row_tile, next_unit, outputs, inner,
                scale_blocks, BLOCKS, PER_BLOCK, ROW_GROUP, GATED, GROUPS, group,
            )  # fmt: skip
        mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
        mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
        w, x = weights.index(stage * GROUPS + group), rows.index(i % X_STAGES)
        if BITS == 16:
            acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        else:
            acc = multiply(
                acc, w, x, scales, zeros, PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS,
                SYNC,
            )  # fmt: skip
        mbarrier.arrive(empty.index(stage), count=1)
        if next_block == 0:
            r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
            n = _rows_of(row_tile, r, inner, outputs, GATED, GROUPS, group)
            first = row_tile * GROUPS + group  # of the runs of rows of warpgroups
            bias_factor, row, real = 1.0, place, 1
            if not SINGLE:
                row = gl.load(TILE_ROWS + place, cache_modifier=".cg")
                real = gl.load(TILE_COUNTS + place, cache_modifier=".cg")
            elif SPLITS > 1:
                bias_factor = (place % SPLITS == 0).to(gl.float32)
            sums = weighted(acc, ROW_SCALES, BIAS, expert, n, outputs, FACTOR, bias_factor)
            if GATED:
                write_inner(sums, OUT, row, real, first, inner, ACTIVATION)
            elif SINGLE:
                write_row(sums, PARTS, SCORES, place, first, outputs, SPLITS)
                add_rows(
                    acc, PARTS, ARRIVED, SHARED, SHARED_GATE, OUT, first, outputs, SPLITS * TOP_K
                )
            else:
                write_pairs(
                    sums, PARTS, PAIRS, SCORES, expert, number, real, first, tokens, outputs
                )
            acc = gl.zeros_like(acc)
        place, row_tile, expert, number = next_place, next_row_tile, next_expert, next_number
        block = next_block
        if PER_BLOCK > 0:
            scales = next_scales
        if ZEROS is not None:
            zeros = next_zeros


@gluon.jit(
    do_not_specialize=["tokens", "k_blocks", "row_tiles", "ahead", "scale_blocks"],
    do_not_specialize_on_alignment=["SHARED_GATE"],
)
def _experts_product(
    w_desc, x_desc, SCALES, ZEROS, ROW_SCALES, BIAS, TILES, TILE_ROWS, TILE_COUNTS, NUM_TILES,
    PAIRS, SCORES, PARTS, ARRIVED, SHARED, SHARED_GATE, OUT, tokens, outputs, inner, k_blocks,
    row_tiles, ahead, scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
    SYNC: gl.constexpr, ROW_GROUP: gl.constexpr, FACTOR: gl.constexpr, ACTIVATION: gl.constexpr,
    SINGLE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, SPLITS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
    REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    weights = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * GROUPS, HEIGHT, w_desc.block_type.shape[1]],
        gl.NVMMASharedLayout(128, 16 if BITS == 16 else 32, 2),
    )  # fmt: skip
    rows = gl.allocate_shared_memory(
        x_desc.dtype, [X_STAGES, WIDTH, COLUMNS], gl.NVMMASharedLayout(SWIZZLE, 16, 2)
    )
    w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, GROUPS)
    BLOCKS: gl.constexpr = COLUMNS // SCALE_COLUMNS  # of scales in a unit
    ASKED: gl.constexpr = PER_BLOCK if ROW_GROUP == 1 else 0  # few blocks' scales: L2 has them
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, BIAS, TILES,
                    TILE_ROWS, TILE_COUNTS, NUM_TILES, PAIRS, SCORES, PARTS, ARRIVED, SHARED,
                    SHARED_GATE, OUT, tokens, outputs, inner, k_blocks, row_tiles, scale_blocks,
                    PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR,
                    ACTIVATION, SINGLE, GATED, TOP_K, SPLITS, GROUPS, STAGES, DEPENDENT, 0,
                )),
                (_load_weights, (
                    w_desc, weights, w_full, empty, SCALES, ZEROS, TILES, NUM_TILES, outputs, inner,
                    k_blocks, row_tiles, ahead, scale_blocks, BLOCKS, ASKED, SINGLE, GATED, TOP_K,
                    SPLITS, GROUPS, STAGES, DEPENDENT,
                )),
                (_load_rows, (
                    x_desc, rows, x_full, empty, TILE_ROWS, NUM_TILES, k_blocks, row_tiles, SINGLE,
                    GATED, TOP_K, SPLITS, STAGES, DEPENDENT,
                )),
            ],
            [1, 1], [LOAD_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, BIAS, TILES,
                    TILE_ROWS, TILE_COUNTS, NUM_TILES, PAIRS, SCORES, PARTS, ARRIVED, SHARED,
                    SHARED_GATE, OUT, tokens, outputs, inner, k_blocks, row_tiles, scale_blocks,
                    PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR,
                    ACTIVATION, SINGLE, GATED, TOP_K, SPLITS, GROUPS, STAGES, DEPENDENT, 0,
                )),
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, BIAS, TILES,
                    TILE_ROWS, TILE_COUNTS, NUM_TILES, PAIRS, SCORES, PARTS, ARRIVED, SHARED,
                    SHARED_GATE, OUT, tokens, outputs, inner, k_blocks, row_tiles, scale_blocks,
                    PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR,
                    ACTIVATION, SINGLE, GATED, TOP_K, SPLITS, GROUPS, STAGES, DEPENDENT, 1,
                )),
                (_load_weights, (
                    w_desc, weights, w_full, empty, SCALES, ZEROS, TILES, NUM_TILES, outputs, inner,
                    k_blocks, row_tiles, ahead, scale_blocks, BLOCKS, ASKED, SINGLE, GATED, TOP_K,
                    SPLITS, GROUPS, STAGES, DEPENDENT,
                )),
                (_load_rows, (
                    x_desc, rows, x_full, empty, TILE_ROWS, NUM_TILES, k_blocks, row_tiles, SINGLE,
                    GATED, TOP_K, SPLITS, STAGES, DEPENDENT,
                )),
            ],
            [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
