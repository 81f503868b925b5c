"""y = x W^T for few rows and quantized W on Hopper (sm_90), in Gluon.

_skinny_quantized_gemm: as gemm/hopper/skinny_gemm.py (stream-K, a warp that loads weights without
a wait for the preceding kernel, one that loads x), but for what is done with a unit.
  compute   one or two warpgroups, each 64 rows of a tile: codes from shared memory to registers,
            converted there to operand A of wgmma while the previous step is multiplied; or, up to
            16 rows of x, of mma.sync (SYNC).  APART: one warpgroup by mma.sync, each of whose warps
            has all rows of a tile and columns of its own
  step      128 columns, or those of a scale if these are fewer; of mma.sync 32 or 64
  RAW       codes of int4 are not converted: multiply_apart.py takes zero points off the products
  scales    of 32, 64 or 128 columns: products of a step have sums of their own, which are added
            times their scale in float32.  Of fp4, but for fp16 with scales of 32 columns:
            multiplied into the weights, which is exact.  Of a row: in the epilogue.  Those of the
            next unit are loaded while one is multiplied, from the L2 cache, into which the
            warp that loads weights prefetches them with the unit
  parts     as there; each warpgroup has its own
  norm, residual  as there, but that 1 / rms lies in shared memory, and the residual is loaded at a
            tile's end: registers are few
  GATE      as there; each warpgroup has gates, and ups of the same columns
  reads     PackedWeight; x [M, K], bf16 or fp16, rows 16-byte aligned, M <= BLOCK_M; bias [N] or
            None; X_SQUARES [tiles, M] float32; NORM [N].  Four scales or zero points of 8 bits of a
            row and 128 columns, or eight, as int32
  writes    y [M, N], or [M, N / 2] with GATE, contiguous; WEIGHTED and SQUARES as there
  bound     memory: the codes and scales
  checked   tests/model_zoo/layers/quantized_gemm against float64, on a GPU and in an interpreter
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model_zoo.layers.gemm.hopper.gate import tile_row
from model_zoo.layers.gemm.hopper.norm import inverse_rms, load_residual
from model_zoo.layers.gemm.hopper.rings import ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import (
    add_runs,
    copy_rows,
    load_x,
    share,
    unfold,
    wait_for_room,
    write_part,
)
from model_zoo.layers.quantized_gemm.hopper.convert import columns_layout
from model_zoo.layers.quantized_gemm.hopper.multiply import multiply, runs_layout, sums_layout
from model_zoo.layers.quantized_gemm.hopper.multiply_apart import (
    WARPS,
    add_warps,
    multiply_apart,
    unit_quads,
    whole_layout,
)
from model_zoo.layers.quantized_gemm.hopper.scales import (
    HEIGHT,
    SCALE_COLUMNS,
    elements,
    of_rows,
    prefetch,
)


@gluon.jit
def _load_weights(
    w_desc, weights, w_full, empty, SCALES, ZEROS, N, k_blocks, split_units, ahead, scale_blocks,
    BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr, FOLD: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights, and asks for their scales."""
    STAGES: gl.constexpr = weights.shape[0]
    RUNS: gl.constexpr = 2 if GATED else 1  # of a tile's rows, in the weight
    ROWS: gl.constexpr = weights.shape[1] // FOLD // RUNS
    begin, count = share(N, k_blocks, split_units, ROWS * RUNS)
    if DEPENDENT:
        gdc_launch_dependents()
    for i in range(count):
        unit = begin + i
        wait_for_room(w_full, empty, i, ahead, STAGES)
        copy_rows(w_desc, weights, w_full, unit, i % STAGES, N, k_blocks, FOLD, GROUPS, GATED)
        block = unit % k_blocks * BLOCKS
        for run in gl.static_range(RUNS):
            row = unit // k_blocks * ROWS + run * (N // 2)
            if PER_BLOCK > 0:
                prefetch(SCALES, row, block, N, scale_blocks, ROWS, BLOCKS, PER_BLOCK)
            if ZEROS is not None:
                prefetch(ZEROS, row, block, N, scale_blocks, ROWS, BLOCKS, PER_BLOCK)


@gluon.jit
def _of_unit(
    SCALES, tile, block, N, scale_blocks, BLOCK_N: gl.constexpr, RUN_BLOCKS: gl.constexpr,
    PER_BLOCK: gl.constexpr, ROW_GROUP: gl.constexpr, FOLD: gl.constexpr, GROUPS: gl.constexpr,
    group: gl.constexpr, GATED: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """A unit's scales, or zero points, of the warpgroup's rows: [HEIGHT, scales of a row's run].

    block  of the tile's units; those past the weight's end are as the last ones
    APART  as unit_quads()
    """
    if APART:
        found = unit_quads(
            SCALES, tile, block * RUN_BLOCKS, N, scale_blocks, RUN_BLOCKS, BLOCK_N, PER_BLOCK, GATED
        )  # fmt: skip
    else:
        EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
        layout: gl.constexpr = columns_layout(RUN_BLOCKS * EACH, EACH)
        r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        RUN_ROWS: gl.constexpr = HEIGHT // FOLD
        n = tile_row(tile * GROUPS + group, r % RUN_ROWS, N, RUN_ROWS, GATED)
        run = block * FOLD + r // RUN_ROWS
        found = of_rows(
            SCALES, gl.minimum(n, N - 1), run * RUN_BLOCKS, N, scale_blocks, RUN_BLOCKS, EACH,
            ROW_GROUP,
        )  # fmt: skip
    return found


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """Of a ring: the stage after, and the parity of its barrier's phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _of_tile(sums, FOLD: gl.constexpr, SYNC: gl.constexpr):
    """Sums of a warpgroup's column runs -> those of its rows of a tile [rows, BLOCK_M]."""
    if SYNC:
        return add_runs(sums, FOLD)
    else:
        return unfold(sums, FOLD)


@gluon.jit
def _compute(
    weights, rows, inverses, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED,
    OUT, BIAS, norm, M, N, k_blocks, split_units, scale_blocks, PTX: gl.constexpr,
    CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr,
    FACTORS: gl.constexpr, SYNC: gl.constexpr, ROW_GROUP: gl.constexpr, FACTOR: gl.constexpr,
    FOLD: gl.constexpr, GROUPS: gl.constexpr, group: gl.constexpr, GATE: gl.constexpr,
    APART: gl.constexpr, RAW: gl.constexpr, NORMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: products of its rows of the units, and the epilogue of each tile."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    RUN_BLOCKS: gl.constexpr = rows.shape[2] // SCALE_COLUMNS
    RUN_ROWS: gl.constexpr = weights.shape[1] // GROUPS // FOLD
    WIDTH: gl.constexpr = rows.shape[1] // FOLD if SYNC else rows.shape[1]
    BLOCK_M: gl.constexpr = rows.shape[1] // FOLD
    layout: gl.constexpr = whole_layout(RUN_ROWS, WIDTH) if APART else sums_layout(WIDTH, SYNC)
    WEIGHTED, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, K = norm
    own_inverses = inverses.index(group)
    begin, count = share(N, k_blocks, split_units, GROUPS * RUN_ROWS)
    if APART:
        acc = gl.zeros([WARPS, RUN_ROWS, WIDTH], gl.float32, runs_layout(WARPS))
    else:
        acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    tile, block = begin // k_blocks, begin % k_blocks
    stage, phase, x_stage, x_phase = 0, 0, 0, 0
    scales, zeros = None, None
    if PER_BLOCK > 0:
        scales = _of_unit(
            SCALES, tile, block, N, scale_blocks, RUN_ROWS, RUN_BLOCKS, PER_BLOCK, ROW_GROUP, FOLD,
            GROUPS, group, GATE != "", APART,
        )  # fmt: skip
    if ZEROS is not None:
        zeros = _of_unit(
            ZEROS, tile, block, N, scale_blocks, RUN_ROWS, RUN_BLOCKS, PER_BLOCK, ROW_GROUP, FOLD,
            GROUPS, group, GATE != "", APART,
        )  # fmt: skip
    like_sums = gl.zeros([RUN_ROWS if APART else HEIGHT, WIDTH], gl.float32, layout)
    of_tile: gl.constexpr = _of_tile(like_sums, FOLD, SYNC).type.layout
    if NORMS:
        if DEPENDENT:
            gdc_wait()
        columns: gl.constexpr = gl.SliceLayout(0, of_tile)
        own_inverses.store(inverse_rms(X_SQUARES, tiles, M, K, eps, columns, BLOCK_M))
    for i in range(count):
        ends = block == k_blocks - 1
        next_block = gl.where(ends, 0, block + 1)
        next_tile = gl.where(ends, tile + 1, tile)
        if PER_BLOCK > 0:
            next_scales = _of_unit(
                SCALES, next_tile, next_block, N, scale_blocks, RUN_ROWS, RUN_BLOCKS, PER_BLOCK,
                ROW_GROUP, FOLD, GROUPS, group, GATE != "", APART,
            )  # fmt: skip
        if ZEROS is not None:
            next_zeros = _of_unit(
                ZEROS, next_tile, next_block, N, scale_blocks, RUN_ROWS, RUN_BLOCKS, PER_BLOCK,
                ROW_GROUP, FOLD, GROUPS, group, GATE != "", APART,
            )  # fmt: skip
        if ROW_SCALES is not None:
            r = gl.arange(0, FOLD * RUN_ROWS, gl.SliceLayout(1, layout)) % RUN_ROWS
            n = tile_row(tile * GROUPS + group, r, N, RUN_ROWS, GATE != "")
            row_scale = gl.load(ROW_SCALES + gl.minimum(n, N - 1))
        is_last = ends | (i == count - 1)  # of the program's units of the tile
        mbarrier.wait(w_full.index(stage), phase)
        mbarrier.wait(x_full.index(x_stage), x_phase)
        if APART:
            acc = multiply_apart(
                acc, weights.index(stage), rows.index(x_stage), scales, zeros, PTX,
                CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, RAW,
            )  # fmt: skip
        else:
            acc = multiply(
                acc, weights.index(stage).slice(group * HEIGHT, HEIGHT, 0),
                rows.index(x_stage), scales, zeros, PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK,
                FACTORS, SYNC,
            )  # fmt: skip
        mbarrier.arrive(empty.index(stage), count=1)
        if is_last:
            factors, residual_sum = None, None
            if NORMS:
                factors = own_inverses.load(gl.SliceLayout(0, of_tile))
            if NORMS and GATE == "":
                residual, weight = load_residual(
                    OUT, NORM, tile * GROUPS + group, adds, M, N, RUN_ROWS, BLOCK_M
                )
                no_ranks = (OUT, OUT, ARRIVED, 0, 0)
                residual_sum = (residual, weight, plus_one, WEIGHTED, SQUARES, adds, no_ranks)
            starts = i >= block  # whether the program has the tile's first unit
            slot = 2 * gl.program_id(0) + starts.to(gl.int32)
            sums = add_warps(acc) if APART else acc
            if ROW_SCALES is not None:
                sums = sums * (row_scale.to(gl.float32) * FACTOR)[:, None]
            elif FACTOR != 1.0:
                sums = sums * FACTOR
            write_part(
                _of_tile(sums, FOLD, SYNC), starts & ends, tile, slot, PARTS, ARRIVED, OUT,
                BIAS, M, N, k_blocks, split_units, factors, residual_sum, GROUPS, group, GATE,
            )  # fmt: skip
            acc = gl.zeros_like(acc)
        tile, block = next_tile, next_block
        stage, phase = _next(stage, phase, STAGES)
        x_stage, x_phase = _next(x_stage, x_phase, X_STAGES)
        if PER_BLOCK > 0:
            scales = next_scales
        if ZEROS is not None:
            zeros = next_zeros


@gluon.jit(
    do_not_specialize=[
        "adds", "tiles", "plus_one", "M", "N", "K", "k_blocks", "split_units", "ahead",
        "scale_blocks",
    ]
)  # fmt: skip
def _skinny_quantized_gemm(
    w_desc, x_desc, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED, OUT, BIAS, WEIGHTED, SQUARES,
    X_SQUARES, NORM, adds, tiles, plus_one, eps, M, N, K, k_blocks, split_units, ahead,
    scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
    SYNC: gl.constexpr, ROW_GROUP: gl.constexpr, FACTOR: gl.constexpr, FOLD: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
    REGISTERS: gl.constexpr, GATE: gl.constexpr, APART: gl.constexpr, RAW: gl.constexpr,
    NORMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GROUPS: warpgroups that compute; one if FOLD > 1 or APART.  GATE: "silu", "gelu" or "".
    NORMS: whether `tiles` and `adds` may be other than 0."""
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    BLOCKS: gl.constexpr = FOLD * COLUMNS // SCALE_COLUMNS  # of scales in a unit
    GATED: gl.constexpr = GATE != ""
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0] * (2 * GROUPS if GATED else 1)
    weights = gl.allocate_shared_memory(
        gl.int32, [STAGES, FOLD * BLOCK_N, w_desc.block_type.shape[1]],
        gl.NVMMASharedLayout(128, 32, 2),
    )  # fmt: skip
    rows = gl.allocate_shared_memory(
        x_desc.dtype, [X_STAGES, WIDTH, COLUMNS], gl.NVMMASharedLayout(SWIZZLE, 16, 2)
    )
    inverses = gl.allocate_shared_memory(
        gl.float32, [GROUPS, WIDTH // FOLD], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, GROUPS)
    norm = (WEIGHTED, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, K)
    ASKED: gl.constexpr = PER_BLOCK if ROW_GROUP == 1 else 0  # few blocks' scales: L2 has them
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, inverses, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES,
                    PARTS, ARRIVED, OUT, BIAS, norm, M, N, k_blocks, split_units, scale_blocks, PTX,
                    CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR, FOLD,
                    GROUPS, 0, GATE, APART, RAW, NORMS, DEPENDENT,
                )),
                (_load_weights, (
                    w_desc, weights, w_full, empty, SCALES, ZEROS, N, k_blocks, split_units, ahead,
                    scale_blocks, BLOCKS, ASKED, FOLD, GROUPS, GATED, DEPENDENT,
                )),
                (load_x, (
                    x_desc, rows, x_full, empty, N, k_blocks, split_units, BLOCK_N, STAGES, FOLD,
                    DEPENDENT,
                )),
            ],
            [1, 1], [40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, inverses, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES,
                    PARTS, ARRIVED, OUT, BIAS, norm, M, N, k_blocks, split_units, scale_blocks, PTX,
                    CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR, FOLD,
                    GROUPS, 0, GATE, APART, RAW, NORMS, DEPENDENT,
                )),
                (_compute, (
                    weights, rows, inverses, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES,
                    PARTS, ARRIVED, OUT, BIAS, norm, M, N, k_blocks, split_units, scale_blocks, PTX,
                    CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS, SYNC, ROW_GROUP, FACTOR, FOLD,
                    GROUPS, 1, GATE, APART, RAW, NORMS, DEPENDENT,
                )),
                (_load_weights, (
                    w_desc, weights, w_full, empty, SCALES, ZEROS, N, k_blocks, split_units, ahead,
                    scale_blocks, BLOCKS, ASKED, FOLD, GROUPS, GATED, DEPENDENT,
                )),
                (load_x, (
                    x_desc, rows, x_full, empty, N, k_blocks, split_units, BLOCK_N, STAGES, FOLD,
                    DEPENDENT,
                )),
            ],
            [4, 1, 1], [REGISTERS, 40, 40],
        )  # fmt: skip
