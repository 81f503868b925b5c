"""y = x W^T for few rows in fp8, both W and x, on Hopper (sm_90), in Gluon.

skinny_fp8_gemm: as gemm/hopper/skinny_gemm.py (stream-K, a warp that loads weights without a wait
for the preceding kernel, one that loads x), but codes of 8 bits are multiplied as they are.
  compute   four warps, wgmma of e4m3.  Products of a unit, or of 128 columns (BY_BLOCK), have sums
            of their own, which are added in float32: the tensor cores' have fewer bits
  CONVERT   x is of 16 bits, and eight more warps quantize each unit of it (convert_rows.py), with
            scales of the unit's rows; norms and the residual are as in skinny_gemm.py
  scales    of rows of W, and of x unless CONVERT: in the epilogue.  BY_BLOCK, of 128 x 128 of W and
            1 x 128 of x: times each sum, loaded while the unit's weights are on their way
  reads     W [N, K] e4m3, rows 16-byte aligned; x [at least M, K] e4m3 or of 16 bits, M <= BLOCK_M;
            scales of x [M, 1], or [M, scale_blocks] with strides (1, x_rows), and of W [N], or
            [N / 128, scale_blocks] contiguous; bias [N] or None
  writes    y [M, N], or with GATE [M, N / 2] (gemm/hopper/gate.py), contiguous
  bound     memory: N * K bytes
  checked   tests/model_zoo/layers/quantized_gemm/test_skinny_fp8_gemm.py and, with CONVERT,
            test_fp8_gemm_of_16_bits.py against float64, on a GPU and in an interpreter
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from model_zoo.layers.gemm.hopper.gate import tile_row
from model_zoo.layers.gemm.hopper.norm import inverse_rms, load_residual
from model_zoo.layers.gemm.hopper.rings import barriers, ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import (
    load_weights,
    load_x,
    share,
    tile_units,
    unfold,
    write_part,
)
from model_zoo.layers.quantized_gemm.hopper.convert_rows import quantize_units

GROUP = gl.constexpr(128)  # columns, and rows of W, of a scale
CONVERT_REGISTERS = gl.constexpr(72)  # per thread that quantizes x


@gluon.jit
def _block_scales(
    X_SCALES, W_SCALES, x_rows, M, N, unit, k_blocks, scale_blocks, BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr, FOLD: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr,
    CONVERT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of a unit: those of x [WIDTH] and of W [HEIGHT] for each of STEPS runs of 128 columns.

    CONVERT: those of W alone
    """
    HEIGHT: gl.constexpr = FOLD * BLOCK_N
    r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    m = gl.minimum(c % (WIDTH // FOLD), M - 1)
    first = unit % k_blocks * FOLD  # column runs are stacked in W's rows, and in x's
    n = gl.minimum(tile_row(unit // k_blocks, r % BLOCK_N, N, BLOCK_N, GATED), N - 1)
    w_row = W_SCALES + n // GROUP * scale_blocks
    of_x, of_w = (), ()
    for k in gl.static_range(STEPS):
        x_block = gl.minimum((first + c // (WIDTH // FOLD)) * STEPS + k, scale_blocks - 1)
        w_block = gl.minimum((first + r // BLOCK_N) * STEPS + k, scale_blocks - 1)
        if not CONVERT:
            of_x = of_x + (gl.load(X_SCALES + x_block * x_rows + m),)  # noqa: RUF005
        of_w = of_w + (gl.load(w_row + w_block),)  # noqa: RUF005
    return of_x, of_w


@gluon.jit
def _row_scaled(acc, X_SCALES, W_SCALES, tile, M, N, GATED: gl.constexpr, CONVERT: gl.constexpr):
    """The sums of a tile times the scales of its rows of W, and of x unless CONVERT."""
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = tile_row(tile, r, N, acc.shape[0], GATED)
    acc *= gl.load(W_SCALES + gl.minimum(n, N - 1)).to(gl.float32)[:, None]
    if not CONVERT:
        m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc *= gl.load(X_SCALES + gl.minimum(m, M - 1))[None, :]
    return acc


@gluon.jit
def _compute(
    weights, rows, scales, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, X_SCALES, W_SCALES,
    NORMS, x_rows, M, N, k_blocks, split_units, scale_blocks, FOLD: gl.constexpr,
    BY_BLOCK: gl.constexpr, GATE: gl.constexpr, CONVERT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: wgmma over the units of each tile, and its epilogue."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = rows.shape[1]
    STEPS: gl.constexpr = rows.shape[2] // GROUP if BY_BLOCK else 1
    COLUMNS: gl.constexpr = rows.shape[2] // STEPS
    BLOCK_N: gl.constexpr = HEIGHT // FOLD
    BLOCK_M: gl.constexpr = WIDTH // FOLD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    end = begin + count
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    factors = None
    if CONVERT:
        WEIGHTED, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, K = NORMS
        if DEPENDENT:
            gdc_wait()
        of_row: gl.constexpr = gl.SliceLayout(0, unfold(nothing, FOLD).type.layout)
        factors = inverse_rms(X_SQUARES, tiles, M, K, eps, of_row, BLOCK_M)
    for tile in range(begin // k_blocks, gl.cdiv(end, k_blocks)):
        start, stop, has_first, is_whole = tile_units(tile, begin, end, k_blocks)
        residual_sum = None
        if CONVERT and GATE == "":
            residual, weight = load_residual(OUT, NORM, tile, adds, M, N, BLOCK_N, BLOCK_M)
            residual_sum = (residual, weight, plus_one, WEIGHTED, SQUARES, adds)
        acc = gl.zeros_like(nothing)
        for unit in range(start, stop):
            i = unit - begin
            stage = i % STAGES
            mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
            if BY_BLOCK:  # the kernel that writes them has ended, as x is here
                of_x, of_w = _block_scales(
                    X_SCALES, W_SCALES, x_rows, M, N, unit, k_blocks, scale_blocks, BLOCK_N, WIDTH,
                    FOLD, STEPS, GATE != "", CONVERT, layout,
                )  # fmt: skip
            if CONVERT:
                of_unit = scales.index(i % X_STAGES).load(gl.SliceLayout(0, layout))
            mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
            w, x = weights.index(stage), rows.index(i % X_STAGES)
            for k in gl.static_range(STEPS):
                product = warpgroup_mma(
                    w.slice(k * COLUMNS, COLUMNS, 1),
                    x.slice(k * COLUMNS, COLUMNS, 1).permute((1, 0)),
                    nothing, use_acc=False, is_async=True,
                )  # fmt: skip
                product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
                if BY_BLOCK:
                    product *= of_w[k][:, None]
                    if not CONVERT:
                        product *= of_x[k][None, :]
                if CONVERT:
                    product *= of_unit[None, :]
                acc += product
            mbarrier.arrive(empty.index(stage), count=1)
        slot = 2 * gl.program_id(0) + has_first.to(gl.int32)
        total = unfold(acc, FOLD)
        if not BY_BLOCK:
            total = _row_scaled(total, X_SCALES, W_SCALES, tile, M, N, GATE != "", CONVERT)
        write_part(
            total, is_whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
            factors, residual_sum, 1, 0, GATE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "adds", "tiles", "plus_one", "x_rows", "M", "K", "k_blocks", "split_units", "ahead",
        "scale_blocks",
    ]
)  # fmt: skip
def skinny_fp8_gemm(
    w_desc, x_desc, PARTS, ARRIVED, OUT, BIAS, X_SCALES, W_SCALES, WEIGHTED, SQUARES, X_SQUARES,
    NORM, adds, tiles, plus_one, eps, x_rows, M, N, K, k_blocks, split_units, ahead, scale_blocks,
    FOLD: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
    BY_BLOCK: gl.constexpr, GATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """CODE_STAGES: of x's codes, if x is of 16 bits; 0: x is codes."""
    CONVERT: gl.constexpr = CODE_STAGES > 0
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = FOLD * w_desc.block_type.shape[0] * (2 if GATE != "" else 1)
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, COLUMNS], swizzled)
    if CONVERT:
        wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        rows = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, WIDTH, COLUMNS], wide)
        codes = gl.allocate_shared_memory(w_desc.dtype, [CODE_STAGES, WIDTH, COLUMNS], swizzled)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [CODE_STAGES, WIDTH], plain)
        x_full, x_empty = barriers(X_STAGES, 1), barriers(X_STAGES, 1)
        w_full, full, empty = ring_barriers(STAGES, CODE_STAGES, 1)
        norms = (WEIGHTED, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, K)
        gl.warp_specialize(
            [
                (_compute, (
                    weights, codes, scales, w_full, full, empty, PARTS, ARRIVED, OUT, BIAS,
                    X_SCALES, W_SCALES, norms, x_rows, M, N, k_blocks, split_units, scale_blocks,
                    FOLD, BY_BLOCK, GATE, CONVERT, DEPENDENT,
                )),
                (quantize_units, (
                    rows, codes, scales, x_full, x_empty, full, empty, N, k_blocks, split_units,
                    HEIGHT // FOLD, STAGES,
                )),
                (load_weights, (
                    w_desc, weights, w_full, empty, N, k_blocks, split_units, ahead, FOLD,
                    GATE != "", DEPENDENT,
                )),
                (load_x, (
                    x_desc, rows, x_full, x_empty, N, k_blocks, split_units, HEIGHT // FOLD,
                    X_STAGES, FOLD, DEPENDENT,
                )),
            ],
            [8, 1, 1], [CONVERT_REGISTERS, 40, 40],
        )  # fmt: skip
    else:
        rows = gl.allocate_shared_memory(w_desc.dtype, [X_STAGES, WIDTH, COLUMNS], swizzled)
        w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, 1)
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, None, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, X_SCALES,
                    W_SCALES, None, x_rows, M, N, k_blocks, split_units, scale_blocks, FOLD,
                    BY_BLOCK, GATE, CONVERT, DEPENDENT,
                )),
                (load_weights, (
                    w_desc, weights, w_full, empty, N, k_blocks, split_units, ahead, FOLD,
                    GATE != "", DEPENDENT,
                )),
                (load_x, (
                    x_desc, rows, x_full, empty, N, k_blocks, split_units, HEIGHT // FOLD, STAGES,
                    FOLD, DEPENDENT,
                )),
            ],
            [1, 1], [40, 40],
        )  # fmt: skip
