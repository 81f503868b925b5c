"""GEMM of many rows on Hopper (sm_90) that stores its result in several places, in Gluon.

sending_gemm_hopper
  grid      persistent, one CTA per SM or fewer; program p runs tiles p, p + programs and so on, in
            the order of swiglu.py
  tile      128 rows of x by 256 rows of W
  warps     one loads x and W by TMA into a ring of stages, running ahead into the next tile; two
            consumer warpgroups compute half of a tile's rows each; PACED: one stores their results
  reads     x [M, K], W [N, K], bf16 or fp16, rows 16-byte aligned; W before the wait for the
            preceding kernel
  writes    x W^T [M, N] in 1 to 8 outputs, rows 16-byte aligned, by TMA: one of them may be this
            GPU's, others in memory of other GPUs that is mapped here.  Shared memory has room for
            the whole tile, so that NVLink takes it while the next tile is multiplied.  PACED:
            stores are spread over that time (paced_stores.py); else the consumers store it at once
  math      float32 sums, rounded once; 0.0 for -0.0, which tells receivers that a number has not
            come (all_reduce/sum_of_row.py)
  bound     compute: 2 * M * N * K floating-point operations, or NVLink: 2 * M * N bytes to each GPU
  checked   tests/model_zoo/layers/gemm/test_sending_gemm.py: interpreted, and on a GPU against
            float64
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from model_zoo.layers.gemm.hopper.many_rows import (
    DEPTH,
    GROUPS,
    HALF,
    ROWS,
    load,
    stage_barriers,
    tile_coords,
    tile_sums,
)
from model_zoo.layers.gemm.hopper.paced_stores import (
    BLOCKS,
    PIECE_COLUMNS,
    hand_over,
    store_paced,
    tile_barriers,
)

WIDTH = gl.constexpr(2 * HALF.value)  # of W's rows in a tile
STAGES = gl.constexpr(3)  # beside which shared memory has room for a tile of results
MAX_OUTS = 8


@gluon.jit
def _rounded(acc, dtype: gl.constexpr):
    return acc.to(dtype) + 0.0  # -0.0 + 0.0 is 0.0, also where a sum was rounded to -0.0


@gluon.jit
def _send(y, outs, results, row, column):
    """Store a group's results in all outputs; rows and columns out of bounds are not stored.

    The wait is for the outputs' reads of the group's previous tile in shared memory.
    """
    tma.store_wait(pendings=0)
    results.store(y)
    fence_async_shared()
    for i in gl.static_range(len(outs)):
        tma.async_copy_shared_to_global(outs[i], [row, column], results)


@gluon.jit
def _multiply(
    rows, weights, results, full, empty, outs, m_tiles, n_tiles, k_blocks, band, g: gl.constexpr
):
    """A consumer warpgroup: ROWS rows of each tile, which it stores."""
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        acc, stage, phase = tile_sums(rows, weights, full, empty, stage, phase, k_blocks, g)
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        y = _rounded(acc, results.dtype)
        _send(y, outs, results.index(g), (m * GROUPS + g) * ROWS, n * WIDTH)
    tma.store_wait(pendings=0)


@gluon.jit
def _multiply_paced(
    rows, weights, results, full, empty, written, read, tiles, k_blocks, g: gl.constexpr
):
    """A consumer warpgroup: ROWS rows of each tile, which the store warp stores."""
    stage, phase, parity = 0, 0, 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc, stage, phase = tile_sums(rows, weights, full, empty, stage, phase, k_blocks, g)
        hand_over(_rounded(acc, results.dtype), results, written, read, parity, g)
        parity ^= 1


@gluon.jit
def _append(descs, desc):
    """A tuple of descriptors and one more, which may be None."""
    if desc is not None:
        descs += (desc,)
    return descs


@gluon.jit
def _run(
    x_desc, w_desc, rows, weights, outs, m_tiles, n_tiles, k_blocks, band, DEPENDENT: gl.constexpr
):
    """The warps of a kernel whose consumers store their results."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    results = gl.allocate_shared_memory(x_desc.dtype, [GROUPS, ROWS, WIDTH], swizzled)
    full, empty = stage_barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, full, empty, outs, m_tiles, n_tiles, k_blocks, band, 0,
            )),
            (_multiply, (
                rows, weights, results, full, empty, outs, m_tiles, n_tiles, k_blocks, band, 1,
            )),
            (load, (
                x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band,
                HALF, WIDTH, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _run_paced(
    x_desc, w_desc, rows, weights, outs, m_tiles, n_tiles, k_blocks, band, DEPENDENT: gl.constexpr
):
    """The warps of a kernel whose store warp stores the consumers' results."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PIECE_ROWS: gl.constexpr = outs[0].block_type.shape[0]
    PIECES: gl.constexpr = GROUPS * BLOCKS * ROWS // PIECE_ROWS
    results = gl.allocate_shared_memory(x_desc.dtype, [PIECES, PIECE_ROWS, PIECE_COLUMNS], swizzled)
    full, empty = stage_barriers(STAGES, GROUPS + 1)
    written, read = tile_barriers()
    gl.warp_specialize(
        [
            (_multiply_paced, (
                rows, weights, results, full, empty, written, read, m_tiles * n_tiles, k_blocks, 0,
            )),
            (_multiply_paced, (
                rows, weights, results, full, empty, written, read, m_tiles * n_tiles, k_blocks, 1,
            )),
            (load, (
                x_desc, w_desc, rows, weights, full, empty, m_tiles, n_tiles, k_blocks, band,
                HALF, WIDTH, DEPENDENT,
            )),
            (store_paced, (
                results, full, empty, written, read, outs, m_tiles, n_tiles, k_blocks, band, STAGES,
            )),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


# Triton's launcher takes no tuple of descriptors: outputs beyond those of a call are None.
@gluon.jit(do_not_specialize=["m_tiles", "n_tiles", "k_blocks", "band"])
def sending_gemm_hopper(
    x_desc, w_desc, out0, out1, out2, out3, out4, out5, out6, out7, m_tiles, n_tiles, k_blocks,
    band, PACED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x_desc.dtype
    rows = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, DEPTH], swizzled)
    weights = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, DEPTH], swizzled)
    outs = _append(_append(_append((out0,), out1), out2), out3)
    outs = _append(_append(_append(_append(outs, out4), out5), out6), out7)
    if PACED:
        _run_paced(x_desc, w_desc, rows, weights, outs, m_tiles, n_tiles, k_blocks, band, DEPENDENT)
    else:
        _run(x_desc, w_desc, rows, weights, outs, m_tiles, n_tiles, k_blocks, band, DEPENDENT)
