"""What these kernels share on Hopper (sm_90), in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clear(tile, tokens):
    """Zero the rows of a tile [64, columns] from `tokens` on, by four warps: what is there may be
    NaN.  fence_async_shared() has to follow, if tensor cores read them."""
    COLUMNS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    for j in gl.static_range(tile.shape[0] // 16):
        rows = tile.slice(j * 16, 16, 0)
        token = j * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        values = rows.load(layout)
        rows.store(gl.where((token < tokens)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def prompt_row(rows, number):
    """A row that is a prompt -> (row, first chunk, first token, one past the last, tokens that its
    sequence had before).

    rows: pointers to the plan's rows, first chunks and counts, to cu_seqlens and cache_seqlens
    """
    ROWS, FIRST_CHUNKS, _, CU_SEQLENS, LENGTHS = rows
    row = gl.load(ROWS + number)
    begin, end = gl.load(CU_SEQLENS + row), gl.load(CU_SEQLENS + row + 1)
    return row, gl.load(FIRST_CHUNKS + number), begin, end, gl.load(LENGTHS + row) - (end - begin)
