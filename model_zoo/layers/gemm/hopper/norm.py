"""The norm of x in GEMMs of few rows on Hopper (sm_90), in Gluon.

norm_layout  the layout of a unit of x while it is normalized: 16 bytes a thread
inverse_rms  1 / rms of the rows of x, from sums of squares that the preceding GEMM has stored
normalize    rms_norm(x) * NORM over a unit of x in shared memory
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attention.common.hopper import cta_barrier

AT_ONCE = gl.constexpr(16)  # sums of squares that a thread loads at once


@gluon.constexpr_function
def columns_at_once(width, columns):
    """Of x [width, columns]: some 32 elements a thread, in whole rows of 128 bytes."""
    return min(columns, max(64, 4096 // width))


@gluon.constexpr_function
def norm_layout(width, columns):
    lanes = min(32, columns_at_once(width, columns) // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def inverse_rms(SQUARES, tiles, M, K, eps, factor, FOLD: gl.constexpr):
    """SQUARES [tiles, M] -> [WIDTH], in factor's layout; x has FOLD runs of columns as rows.

    The tiles' sums are added in one order, whatever M is.
    """
    WIDTH: gl.constexpr = factor.shape[0]
    CHUNK: gl.constexpr = AT_ONCE * 128 // WIDTH
    LANES: gl.constexpr = min(32, WIDTH)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    t = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    m = gl.arange(0, WIDTH, gl.SliceLayout(0, layout)) % (WIDTH // FOLD)
    total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, layout))
    for i in range(gl.cdiv(tiles, CHUNK)):
        tile = i * CHUNK + t
        there = (tile < tiles)[:, None] & (m < M)[None, :]
        total += gl.sum(gl.load(SQUARES + tile[:, None] * M + m[None, :], mask=there, other=0.0), 0)
    return gl.convert_layout(gl.rsqrt(total / K + eps), factor.type.layout)


@gluon.jit
def normalize(x, factor, NORM, block, K, plus_one, FOLD: gl.constexpr, layout: gl.constexpr):
    """x [WIDTH, columns] of a unit in shared memory = x * factor * NORM, as add_rms_norm rounds.

    block: the unit's number among those of its tile; plus_one: unless 0, NORM + 1 multiplies
    """
    WIDTH: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = columns_at_once(WIDTH, COLUMNS)
    r = gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    end = K // 8 * 8  # K is such a multiple, and so the loads of NORM have 16 bytes
    for j in gl.static_range(COLUMNS // CHUNK):
        part = x.slice(j * CHUNK, CHUNK, 1)
        if FOLD == 1:
            k = (block * COLUMNS + j * CHUNK + c)[None, :]
        else:
            run = block * FOLD + r // (WIDTH // FOLD)
            k = (run * COLUMNS)[:, None] + (j * CHUNK + c)[None, :]
        weight = gl.load(NORM + k, mask=k < end, other=0.0).to(gl.float32)
        wide = part.load(layout).to(gl.float32) * factor[:, None]
        if plus_one != 0:
            y = (wide * (1.0 + weight)).to(x.dtype)
        else:
            y = (weight * wide.to(x.dtype).to(gl.float32)).to(x.dtype)
        part.store(y)
    fence_async_shared()
    cta_barrier()
