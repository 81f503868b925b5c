"""y = x W^T for few rows in fp8 whose codes come from the GEMM before, on Hopper (sm_90), in Gluon.

tiled_fp8_gemm: as gemm/hopper/skinny_gemm.py, norms in the epilogues of both GEMMs included; x has
scales of 1 x 64 columns (gemm/hopper/codes.py), which are copied with its units.
  compute   four warps, wgmma of e4m3.  Products of 64 columns have sums of their own, which are
            added in float32 times their scale: one run is multiplied while the one before is added
  scales    of rows of W: in the epilogue
  reads     W [N, K] and x [M, K] e4m3, rows 16-byte aligned; scales of x, and of W [N]; bias [N]
  writes    y [M, N] in 16 bits, added to the residual if `adds`; codes of the next norm's weight
            times that sum, and sums of its squares; or with GATE codes of activation(gate) * up
  bound     memory: N * K bytes
  checked   tests/model_zoo/layers/quantized_gemm/tiled/test_tiled_fp8_gemm.py against float64
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from model_zoo.layers.gemm.hopper.codes import TILE_COLUMNS
from model_zoo.layers.gemm.hopper.gate import tile_row
from model_zoo.layers.gemm.hopper.norm import inverse_rms, load_residual
from model_zoo.layers.gemm.hopper.rings import ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import (
    load_weights,
    share,
    tile_units,
    unfold,
    write_part,
)


@gluon.jit
def _load_x(
    x_desc, s_desc, rows, scales, x_full, empty, N, k_blocks, split_units, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FOLD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that loads codes and scales, which the preceding kernel writes.  STAGES: of W."""
    X_STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    STEPS: gl.constexpr = s_desc.block_type.shape[0]
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    if DEPENDENT:
        gdc_wait()
    for i in range(count):
        if i >= X_STAGES:  # a unit of both is released by the barrier of W's
            before = i - X_STAGES
            mbarrier.wait(empty.index(before % STAGES), (before // STAGES) & 1)
        slot, block = i % X_STAGES, (begin + i) % k_blocks
        full = x_full.index(slot)
        mbarrier.expect(full, FOLD * x_desc.block_type.nbytes + s_desc.block_type.nbytes)
        for j in gl.static_range(FOLD):
            tma.async_copy_global_to_shared(
                x_desc, [0, (block * FOLD + j) * COLUMNS], full,
                rows.index(slot).slice(j * ROWS, ROWS, 0),
            )  # fmt: skip
        tma.async_copy_global_to_shared(s_desc, [block * STEPS, 0], full, scales.index(slot))


@gluon.jit
def _add_unit(acc, w, x, scales, nothing, STEPS: gl.constexpr):
    """acc + the products of STEPS runs of columns, each times x's scales [STEPS, WIDTH]."""
    COLUMNS: gl.constexpr = x.shape[1] // STEPS
    for k in gl.static_range(STEPS + 1):
        if k < STEPS:
            following = warpgroup_mma(
                w.slice(k * COLUMNS, COLUMNS, 1), x.slice(k * COLUMNS, COLUMNS, 1).permute((1, 0)),
                nothing, use_acc=False, is_async=True,
            )  # fmt: skip
        if k > 0:
            of_x = scales.slice(k - 1, 1, 0).load(acc.type.layout)
            product = warpgroup_mma_wait(
                num_outstanding=1 if k < STEPS else 0,
                deps=(pending,),  # noqa: F821
            )
            acc += product * of_x
        if k < STEPS:
            pending = following  # noqa: F841
    return acc


@gluon.jit
def _compute(
    weights, rows, scales, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, W_SCALES, CODES,
    CODE_SCALES, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, M, N, K, k_blocks,
    split_units, FOLD: gl.constexpr, OUT_FOLD: gl.constexpr, OUT_STEPS: gl.constexpr,
    GATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: wgmma over the units of each tile, and its epilogue."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = rows.shape[1]
    BLOCK_N: gl.constexpr = HEIGHT // FOLD
    BLOCK_M: gl.constexpr = WIDTH // FOLD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    end = begin + count
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    of_tile: gl.constexpr = unfold(nothing, FOLD).type.layout
    if DEPENDENT:
        gdc_wait()
    factors = inverse_rms(X_SQUARES, tiles, M, K, eps, gl.SliceLayout(0, of_tile), BLOCK_M)
    codes = None
    if CODES is not None:
        codes = (CODES, CODE_SCALES, OUT_FOLD, OUT_STEPS)
    for tile in range(begin // k_blocks, gl.cdiv(end, k_blocks)):
        start, stop, has_first, is_whole = tile_units(tile, begin, end, k_blocks)
        residual_sum = None
        if GATE == "":
            residual, weight = load_residual(OUT, NORM, tile, adds, M, N, BLOCK_N, BLOCK_M)
            residual_sum = (residual, weight, plus_one, OUT, SQUARES, adds)
        acc = gl.zeros_like(nothing)
        for unit in range(start, stop):
            i = unit - begin
            stage = i % STAGES
            mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
            mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
            acc = _add_unit(
                acc, weights.index(stage), rows.index(i % X_STAGES), scales.index(i % X_STAGES),
                nothing, rows.shape[2] // TILE_COLUMNS,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
        slot = 2 * gl.program_id(0) + has_first.to(gl.int32)
        total = unfold(acc, FOLD)
        r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, of_tile))
        n = tile_row(tile, r, N, BLOCK_N, GATE != "")
        total *= gl.load(W_SCALES + gl.minimum(n, N - 1)).to(gl.float32)[:, None]
        write_part(
            total, is_whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units,
            factors, residual_sum, codes, 1, 0, GATE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "adds", "tiles", "plus_one", "M", "N", "K", "k_blocks", "split_units", "ahead",
    ]
)  # fmt: skip
def tiled_fp8_gemm(
    w_desc, x_desc, s_desc, PARTS, ARRIVED, OUT, BIAS, W_SCALES, CODES, CODE_SCALES, SQUARES,
    X_SQUARES, NORM, adds, tiles, plus_one, eps, M, N, K, k_blocks, split_units, ahead,
    FOLD: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, OUT_FOLD: gl.constexpr,
    OUT_STEPS: gl.constexpr, GATE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """CODES, CODE_SCALES, OUT_FOLD, OUT_STEPS: of write_codes; CODES None: y alone is stored."""
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = FOLD * w_desc.block_type.shape[0] * (2 if GATE != "" else 1)
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, COLUMNS], swizzled)
    rows = gl.allocate_shared_memory(w_desc.dtype, [X_STAGES, WIDTH, COLUMNS], swizzled)
    scales = gl.allocate_shared_memory(
        gl.float32, [X_STAGES, COLUMNS // TILE_COLUMNS, WIDTH], gl.NVMMASharedLayout(0, 32, 2)
    )
    w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, 1)
    gl.warp_specialize(
        [
            (_compute, (
                weights, rows, scales, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, W_SCALES,
                CODES, CODE_SCALES, SQUARES, X_SQUARES, NORM, adds, tiles, plus_one, eps, M, N, K,
                k_blocks, split_units, FOLD, OUT_FOLD, OUT_STEPS, GATE, DEPENDENT,
            )),
            (load_weights, (
                w_desc, weights, w_full, empty, N, k_blocks, split_units, ahead, FOLD, GATE != "",
                DEPENDENT,
            )),
            (_load_x, (
                x_desc, s_desc, rows, scales, x_full, empty, N, k_blocks, split_units,
                HEIGHT // FOLD, STAGES, FOLD, DEPENDENT,
            )),
        ],
        [1, 1], [40, 40],
    )  # fmt: skip
