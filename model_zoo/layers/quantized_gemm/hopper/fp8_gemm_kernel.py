"""y = x W^T for few rows in fp8, both W and x, on Hopper (sm_90), in Gluon.

skinny_fp8_gemm: as gemm/hopper/skinny_gemm.py (stream-K, a warp that loads weights without a wait
for the preceding kernel, one that loads x), but codes of 8 bits are multiplied as they are.
  compute   four warps, wgmma of e4m3.  Products of a unit, or of 128 columns (BY_BLOCK), have sums
            of their own, which are added in float32: the tensor cores' have fewer bits
  scales    of rows of x and of W: in the epilogue.  BY_BLOCK, of 1 x 128 of x and 128 x 128 of W:
            times each sum, loaded while the unit's weights are on their way
  reads     W [N, K] and x [at least M, K] e4m3, rows 16-byte aligned, M <= BLOCK_M; scales of x
            [M, 1], or [M, scale_blocks] with strides (1, x_rows), and of W [N], or
            [N / 128, scale_blocks] contiguous; bias [N] or None
  writes    y [M, N], or with GATE [M, N / 2] (gemm/hopper/gate.py), contiguous
  bound     memory: N * K bytes
  checked   tests/model_zoo/layers/quantized_gemm/test_skinny_fp8_gemm.py against float64, on a GPU
            and in an interpreter
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from model_zoo.layers.gemm.hopper.gate import tile_row
from model_zoo.layers.gemm.hopper.rings import ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import (
    load_weights,
    load_x,
    share,
    tile_units,
    unfold,
    write_part,
)

GROUP = gl.constexpr(128)  # columns, and rows of W, of a scale


@gluon.jit
def _block_scales(
    X_SCALES, W_SCALES, x_rows, M, N, unit, k_blocks, scale_blocks, BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr, FOLD: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Of a unit: those of x [WIDTH] and of W [HEIGHT] for each of STEPS runs of 128 columns."""
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
        of_x = of_x + (gl.load(X_SCALES + x_block * x_rows + m),)  # noqa: RUF005
        of_w = of_w + (gl.load(w_row + w_block),)  # noqa: RUF005
    return of_x, of_w


@gluon.jit
def _row_scaled(acc, X_SCALES, W_SCALES, tile, M, N, GATED: gl.constexpr):
    """The sums of a tile times the scales of its rows of W and of x."""
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = tile_row(tile, r, N, acc.shape[0], GATED)
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    of_w = gl.load(W_SCALES + gl.minimum(n, N - 1)).to(gl.float32)
    return acc * of_w[:, None] * gl.load(X_SCALES + gl.minimum(m, M - 1))[None, :]


@gluon.jit
def _compute(
    weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, X_SCALES, W_SCALES, x_rows, M,
    N, k_blocks, split_units, scale_blocks, FOLD: gl.constexpr, BY_BLOCK: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """Four warps: wgmma over the units of each tile, and its epilogue."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = rows.shape[1]
    STEPS: gl.constexpr = rows.shape[2] // GROUP if BY_BLOCK else 1
    COLUMNS: gl.constexpr = rows.shape[2] // STEPS
    BLOCK_N: gl.constexpr = HEIGHT // FOLD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    end = begin + count
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    for tile in range(begin // k_blocks, gl.cdiv(end, k_blocks)):
        start, stop, has_first, is_whole = tile_units(tile, begin, end, k_blocks)
        acc = gl.zeros_like(nothing)
        for unit in range(start, stop):
            i = unit - begin
            stage = i % STAGES
            mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
            if BY_BLOCK:  # the kernel that writes them has ended, as x is here
                of_x, of_w = _block_scales(
                    X_SCALES, W_SCALES, x_rows, M, N, unit, k_blocks, scale_blocks, BLOCK_N, WIDTH,
                    FOLD, STEPS, GATE != "", layout,
                )  # fmt: skip
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
                    product *= of_w[k][:, None] * of_x[k][None, :]
                acc += product
            mbarrier.arrive(empty.index(stage), count=1)
        slot = 2 * gl.program_id(0) + has_first.to(gl.int32)
        total = unfold(acc, FOLD)
        if not BY_BLOCK:
            total = _row_scaled(total, X_SCALES, W_SCALES, tile, M, N, GATE != "")
        write_part(
            total, is_whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
            None, None, 1, 0, GATE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["x_rows", "M", "N", "k_blocks", "split_units", "ahead", "scale_blocks"]
)
def skinny_fp8_gemm(
    w_desc, x_desc, PARTS, ARRIVED, OUT, BIAS, X_SCALES, W_SCALES, x_rows, M, N, k_blocks,
    split_units, ahead, scale_blocks, FOLD: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, BY_BLOCK: gl.constexpr, GATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = FOLD * w_desc.block_type.shape[0] * (2 if GATE != "" else 1)
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, COLUMNS], swizzled)
    rows = gl.allocate_shared_memory(w_desc.dtype, [X_STAGES, WIDTH, COLUMNS], swizzled)
    w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, 1)
    gl.warp_specialize(
        [
            (_compute, (
                weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, X_SCALES, W_SCALES,
                x_rows, M, N, k_blocks, split_units, scale_blocks, FOLD, BY_BLOCK, GATE,
            )),
            (load_weights, (
                w_desc, weights, w_full, empty, N, k_blocks, split_units, ahead, FOLD, GATE != "",
                DEPENDENT,
            )),
            (load_x, (
                x_desc, rows, x_full, empty, N, k_blocks, split_units, HEIGHT // FOLD, STAGES, FOLD,
                DEPENDENT,
            )),
        ],
        [1, 1], [40, 40],
    )  # fmt: skip
