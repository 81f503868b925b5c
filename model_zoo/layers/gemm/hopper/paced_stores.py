"""Stores of a tile that are spread over the main loop of the program's next tile (sm_90), in Gluon.

All programs finish a tile at about the same time.  If each stored its tile at once, NVLink would
have 8 MB to take at that moment and nothing later on, and TMA loads of an SM may wait behind stores
that NVLink holds up.

    PIECE_COLUMNS   of a box that is stored at a time
    hand_over       what a consumer warpgroup does with its sums of a tile
    store_paced     the store warp
    tile_barriers   those that say that a tile's results are written, and read

The store warp follows the ring of stages as a reader of it, so that it knows how far the loads are.
It is no work of the load warp, which would then wait for NVLink where it waits for results to be
read, and it costs no registers: the load warp's warpgroup has idle warps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from model_zoo.layers.gemm.hopper.many_rows import GROUPS, HALF, ROWS, tile_coords

PIECE_COLUMNS = gl.constexpr(64)  # 128 bytes, the widest swizzle
BLOCKS = gl.constexpr(2 * HALF.value // PIECE_COLUMNS.value)  # of columns in a tile


@gluon.jit
def tile_barriers():
    """-> (written, read): results of a tile are written once each group has handed them over, and
    read once the store warp's copies of them have left shared memory."""
    written = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(written.index(0), count=GROUPS)
    mbarrier.init(read.index(0), count=1)
    fence_async_shared()
    return written, read


@gluon.jit
def _halves(x):
    """The left and the right half of x's columns; no element changes its thread."""
    ROWS_OF_X: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left, right = gl.split(x.reshape([ROWS_OF_X, 2, WIDTH]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def hand_over(y, results, written, read, parity, g: gl.constexpr):
    """Write a group's results of a tile [ROWS, 2 HALF] to shared memory, when that of the tile
    before has been read.

    results  [pieces, rows of a piece, PIECE_COLUMNS]: pieces go down a block of columns
    """
    blocks = results._reinterpret(
        results.dtype, [GROUPS * BLOCKS, ROWS, PIECE_COLUMNS], results.layout
    )
    left, right = _halves(y)
    mbarrier.wait(read.index(0), parity)
    first, second = _halves(left)
    blocks.index(g * BLOCKS).store(first)
    blocks.index(g * BLOCKS + 1).store(second)
    third, fourth = _halves(right)
    blocks.index(g * BLOCKS + 2).store(third)
    blocks.index(g * BLOCKS + 3).store(fourth)
    fence_async_shared()
    mbarrier.arrive(written.index(0), count=1)


@gluon.jit
def _store_pieces(outs, results, m, n, first, last):
    """Start the copies of some pieces of tile (m, n) to all outputs."""
    PIECE_ROWS: gl.constexpr = results.shape[1]
    EACH: gl.constexpr = ROWS // PIECE_ROWS  # pieces of a block of columns
    for piece in range(first, last):
        block = piece // EACH
        row = (m * GROUPS + block // BLOCKS) * ROWS + piece % EACH * PIECE_ROWS
        column = (n * BLOCKS + block % BLOCKS) * PIECE_COLUMNS
        for i in gl.static_range(len(outs)):
            tma.async_copy_shared_to_global(outs[i], [row, column], results.index(piece))


@gluon.jit
def _due(k, k_blocks, turn, PIECES: gl.constexpr):
    """Pieces that are stored before block k is there: all of them shortly before the last block."""
    return gl.minimum((k * (PIECES + 1) + turn) // k_blocks, PIECES)


@gluon.jit
def store_paced(
    results, full, empty, written, read, outs, m_tiles, n_tiles, k_blocks, band,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The store warp: while a tile is multiplied it stores the one before, at times that differ
    between programs.  A program's last tile is stored at once.

    What bounds the loop over pieces is computed anew, as Triton does not carry numbers that are
    bounds alone (tests/support/machine_code/lost_bounds.py).
    """
    PIECES: gl.constexpr = results.shape[0]
    begin = gl.program_id(0)
    turn = begin * k_blocks // gl.num_programs(0)
    stage, phase, parity, m, n = 0, 0, 0, 0, 0
    for tile in range(begin, m_tiles * n_tiles, gl.num_programs(0)):
        there = (tile != begin).to(gl.int32)
        for k in range(k_blocks):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage), count=1)
            first, last = _due(k, k_blocks, turn, PIECES), _due(k + 1, k_blocks, turn, PIECES)
            _store_pieces(outs, results, m, n, there * first, there * last)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        tma.store_wait(pendings=0)
        mbarrier.arrive(read.index(0), count=1)
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        mbarrier.wait(written.index(0), parity)
        parity ^= 1
    # All PIECES, but no constant, which would unroll the loop.
    _store_pieces(outs, results, m, n, 0, _due(k_blocks, k_blocks, turn, PIECES))
    tma.store_wait(pendings=0)
