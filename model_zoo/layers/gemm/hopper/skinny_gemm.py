"""y = x W^T for few rows on Hopper (sm_90), in Gluon: two warps load, four compute.

skinny_gemm: stream-K over the weights' units, an equal contiguous share for each program.
  unit      BLOCK_N rows of W by BLOCK_K columns; units of a tile of rows are consecutive, so that a
            program's share is whole tiles and at most two partial tiles
  grid      any number of programs; no program waits for another
  loads     one warp fills the ring of weights, which do not depend on the preceding kernel, without
            a wait for it.  It asks for few units at once: more would only lengthen the queue at the
            memory, in which the small kernels between two GEMMs stand, too.  The other waits, then
            loads x, in a ring of its own, since it comes from L2
  compute   four warps: W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M] by wgmma, so that the
            rows of x, padded to at least 8, are the N side; float32 accumulation
  fold      wgmma has 64 rows: for a tile with fewer, FOLD column runs of a unit are stacked in W's
            rows and in x's, and the products of different runs are discarded
  parts     partial sums of split tiles go to a workspace; the last program to arrive adds them in
            the order of the columns: deterministic
  norm      if `tiles` is not 0, x has been multiplied by a norm's weight, but not divided by its
            rms: y is, by the sums of squares in X_SQUARES (norm.py)
  residual  if `adds` is not 0, y is added to OUT, which is the residual, and the sum times the
            weight of the next norm is stored in WEIGHTED, with the sums of squares of each tile
  ranks     if WORLD is more than 1, y is a part of a sum over ranks, and is sent to all others; if
            `adds` is not 0, too, their parts are added before the residual (rank_sum.py)
  GATE      W has N / 2 gates and N / 2 ups, and y is silu(gate) * up or gelu(gate) * up; a tile
            has BLOCK_N / 2 of both
  reads     W [N, K] and x [M, K], bf16 or fp16, rows 16-byte aligned, M <= BLOCK_M; bias [N] or
            None; X_SQUARES [tiles, M] float32; NORM [N]
  writes    y [M, N], or [M, N / 2] with GATE, contiguous; WEIGHTED [M, N], and SQUARES
            [N / BLOCK_N, M] float32
  bound     memory: 2 * N * K bytes
  checked   tests/model_zoo/layers/gemm/test_gemm.py and, with GATE, test_gated_gemm.py on a GPU,
            against float64; test_normed_gemm.py also interpreted
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

from model_zoo.layers.gemm.hopper.norm import inverse_rms, load_residual
from model_zoo.layers.gemm.hopper.rings import ring_barriers
from model_zoo.layers.gemm.hopper.stream_k import (
    load_weights,
    load_x,
    share,
    tile_units,
    unfold,
    write_part,
)


@gluon.jit
def _compute(
    weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, WEIGHTED, SQUARES, X_SQUARES,
    NORM, OUTGOING, INCOMING, LIMIT, sender_stride, rank, adds, tiles, plus_one, eps, M, N, K,
    k_blocks, split_units, FOLD: gl.constexpr, GATE: gl.constexpr, WORLD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: wgmma over the units of each tile, and its epilogue."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = rows.shape[1]
    BLOCK_N: gl.constexpr = HEIGHT // FOLD
    BLOCK_M: gl.constexpr = WIDTH // FOLD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    begin, count = share(N, k_blocks, split_units, BLOCK_N)
    end = begin + count
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    of_tile: gl.constexpr = unfold(acc, FOLD).type.layout
    if DEPENDENT:
        gdc_wait()
    factors = inverse_rms(X_SQUARES, tiles, M, K, eps, gl.SliceLayout(0, of_tile), BLOCK_M)
    for tile in range(begin // k_blocks, gl.cdiv(end, k_blocks)):
        start, stop, has_first, is_whole = tile_units(tile, begin, end, k_blocks)
        residual_sum = None
        if GATE == "":
            residual, weight = load_residual(OUT, NORM, tile, adds, M, N, BLOCK_N, BLOCK_M)
            rank_sum = (OUTGOING, INCOMING, LIMIT, sender_stride, rank)
            residual_sum = (residual, weight, plus_one, WEIGHTED, SQUARES, adds, rank_sum)
        for unit in range(start, stop):
            i = unit - begin
            stage = i % STAGES
            mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
            mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
            product = warpgroup_mma(
                weights.index(stage), rows.index(i % X_STAGES).permute((1, 0)), acc,
                use_acc=unit != start, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
            mbarrier.arrive(empty.index(stage), count=1)
        slot = 2 * gl.program_id(0) + has_first.to(gl.int32)
        write_part(
            unfold(acc, FOLD), is_whole, tile, slot, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks,
            split_units, factors, residual_sum, 1, 0, GATE, WORLD,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "sender_stride", "rank", "adds", "tiles", "plus_one", "M", "K", "k_blocks", "split_units",
        "ahead",
    ]
)  # fmt: skip
def _skinny_gemm(
    w_desc, x_desc, PARTS, ARRIVED, OUT, BIAS, WEIGHTED, SQUARES, X_SQUARES, NORM, adds, tiles,
    plus_one, eps, OUTGOING, INCOMING, LIMIT, sender_stride, rank, M, N, K, k_blocks, split_units,
    ahead, FOLD: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    GATE: gl.constexpr, WORLD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GATE: "silu", "gelu" or ""."""
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    HEIGHT: gl.constexpr = FOLD * w_desc.block_type.shape[0] * (1 if GATE == "" else 2)
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, HEIGHT, COLUMNS], swizzled)
    rows = gl.allocate_shared_memory(w_desc.dtype, [X_STAGES, WIDTH, COLUMNS], swizzled)
    w_full, x_full, empty = ring_barriers(STAGES, X_STAGES, 1)
    gl.warp_specialize(
        [
            (_compute, (
                weights, rows, w_full, x_full, empty, PARTS, ARRIVED, OUT, BIAS, WEIGHTED, SQUARES,
                X_SQUARES, NORM, OUTGOING, INCOMING, LIMIT, sender_stride, rank, adds, tiles,
                plus_one, eps, M, N, K, k_blocks, split_units, FOLD, GATE, WORLD, DEPENDENT,
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
