"""Merging of split rows in decode_hopper: by the program that writes the last part.

The compute warps store a part, and one atomic counts it.  The program that counts the last one adds
all parts in the order of the work tiles, so that a plan always gives the same bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention.common.hopper import cta_barrier
from attention.common.softmax import M_INIT
from attention.decode.decode_hopper_tile import write_whole

# Elements of parts that a thread of four warps loads at once: each load of parts takes as long as
# the memory's latency, and a row alone may have as many parts as there are programs.
LOADED = gl.constexpr(64)


@gluon.jit
def _add_parts(
    PARTIAL_OUT, PARTIAL_LSE, first, parts, r, real, layout: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_D: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """-> (acc, m, total) of rows r of `parts` parts, added in order."""
    TOGETHER: gl.constexpr = LOADED * 128 // (ROWS * BLOCK_D)
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    inside = real[:, None] & (d < D)[None, :]
    m = gl.full([ROWS], M_INIT, gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
    for j in range(gl.cdiv(parts, TOGETHER)):
        lses, outs, m_new = (), (), m
        for i in gl.static_range(TOGETHER):
            part = j * TOGETHER + i
            slot = (first + part).to(gl.int64) * QUERIES + r
            # Other SMs wrote them: not from the L1 cache.
            lse = gl.load(
                PARTIAL_LSE + slot, mask=real & (part < parts), other=float("-inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            out = gl.load(
                PARTIAL_OUT + (slot[:, None] * D + d[None, :]), mask=inside & (part < parts),
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            lses, outs, m_new = lses + (lse,), outs + (out,), gl.maximum(m_new, lse)  # noqa: RUF005
        alpha = gl.exp2(m - m_new)
        m, total, acc = m_new, total * alpha, acc * alpha[:, None]
        for i in gl.static_range(TOGETHER):
            weight = gl.exp2(lses[i] - m)
            # The output of a part that saw no key may be anything.
            out = gl.where((lses[i] > float("-inf"))[:, None], outs[i], 0.0)
            total += weight
            acc += out * weight[:, None]
    return acc, m, total


@gluon.jit
def merge_if_last(
    merge, head, q_start, q_len, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, MERGES, ARRIVED,
    out_token, out_head, lse_token,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Count a part that the program has written; the last to be counted merges them all."""
    LANES: gl.constexpr = min(32, BLOCK_D // 4)  # of a row, each with 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    ACROSS: gl.constexpr = 128 // LANES  # rows that the four warps load with one instruction
    ROWS: gl.constexpr = ACROSS if QUERIES <= ACROSS or BLOCK_D > 128 else 2 * ACROSS
    first, parts = gl.load(MERGES + merge * 2), gl.load(MERGES + merge * 2 + 1)
    cta_barrier()  # of the compute warps, whose writes the atomic publishes
    if gl.atomic_add(ARRIVED + merge, 1) == parts - 1:
        for j in range(gl.cdiv(q_len * GROUP, ROWS)):
            r = j * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            real = r < q_len * GROUP
            acc, m, total = _add_parts(
                PARTIAL_OUT, PARTIAL_LSE, first, parts, r, real, layout, ROWS, BLOCK_D, QUERIES, D
            )
            write_whole(
                acc, m, total, OUT, LSE, SINKS, (q_start + r // GROUP).to(gl.int64),
                head * GROUP + r % GROUP, real, out_token, out_head, lse_token, D,
            )  # fmt: skip
        gl.store(ARRIVED + merge, 0)  # for the next launch
