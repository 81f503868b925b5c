"""The load warp of decode_hopper.

It fills a ring of stages in shared memory, starting with K and V of earlier steps while the
preceding kernel still runs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def read_work_tile(WORK, w):
    """The columns of work tile w; past the last tile they are junk that is not used."""
    at = WORK + w * 8
    row, head, first, end = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    q_start, q_len = gl.load(at + 4), gl.load(at + 5)
    kv_len, partial = gl.load(at + 6), gl.load(at + 7)
    return row, head, first, end, q_start, q_len, kv_len, partial


@gluon.jit
def load_work_tiles(
    k_desc, v_desc, keys, values, full, empty, WORK, STARTS, TABLE, table_row, num_pages,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    OVERLAPPED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Load the blocks of the program's work tiles: page ids, then a TMA box per page of K and V.

    Dependents are launched before the block that fills the ring, or that first waits for the
    preceding kernel, is loaded; OVERLAPPED: by the warps that compute, after their wait.

    A page that no query sees is replaced by one past the pool's end, which loads zeros.
    """
    BOX: gl.constexpr = k_desc.block_type.shape[2]  # tokens of a page, at most BLOCK_N
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    program = gl.program_id(0)
    begin, stop = gl.load(STARTS + program), gl.load(STARTS + program + 1)
    after = read_work_tile(WORK, begin)
    tile = 0
    for w in range(begin, stop):
        row, head, first, end, _, q_len, kv_len, _ = after
        after = read_work_tile(WORK, w + 1)
        lowest = 0
        if WINDOW > 0:
            lowest = gl.maximum(kv_len - q_len + 1 - WINDOW, 0)
        table = TABLE + row.to(gl.int64) * table_row
        for i in range(gl.cdiv(end - first, BLOCK_N)):
            start = first + i * BLOCK_N
            is_new = start + BLOCK_N > kv_len - q_len  # includes this step's tokens
            if DEPENDENT and not OVERLAPPED:  # noqa: SIM102
                # The next GEMM's weights are asked for behind the blocks that are read at once.
                if is_new | (tile == STAGES - 1):
                    gdc_launch_dependents()
            pages = ()
            for j in gl.static_range(BLOCK_N // BOX):
                at = start + j * BOX
                valid = (at < end) & (at + BOX > lowest)
                page = gl.load(table + at // PAGE, mask=valid, other=num_pages)
                pages = pages + (page,)  # noqa: RUF005
            if DEPENDENT and is_new:
                gdc_wait()
            stage = tile % STAGES
            mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * (BLOCK_N // BOX) * k_desc.block_type.nbytes)
            k_tile = keys.index(stage).reshape([1, 1, BLOCK_N, BLOCK_D])
            v_tile = values.index(stage).reshape([1, 1, BLOCK_N, BLOCK_D])
            for j in gl.static_range(BLOCK_N // BOX):
                cell = [pages[j], head, (start + j * BOX) % PAGE, 0]
                tma.async_copy_global_to_shared(
                    k_desc, cell, full.index(stage), k_tile.slice(j * BOX, BOX, 2)
                )
                tma.async_copy_global_to_shared(
                    v_desc, cell, full.index(stage), v_tile.slice(j * BOX, BOX, 2)
                )
            tile += 1
    if DEPENDENT and not OVERLAPPED:
        gdc_launch_dependents()
