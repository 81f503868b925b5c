"""How prefill_hopper's consumers write a tile's results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention.common.hopper import write_partial
from attention.common.softmax import LN2, LOG2E
from attention.prefill.prefill_hopper_stages import HALF
from attention.prefill.prefill_hopper_tile import rescaled


@gluon.jit
def write_split(
    acc, m, total, results, w, packed, q_len, g: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """Store the partial result of half a tile of work w for merge_tiles.py."""
    r = gl.arange(0, HALF, m.type.layout)
    slot = w.to(gl.int64) * (2 * HALF) + g * HALF + r
    real = packed + r < q_len * GROUP
    for part in gl.static_range(len(acc)):
        write_partial(
            acc[part], m, total, results[3], results[4], slot, real, D, part * acc[0].shape[1]
        )


@gluon.jit
def write_whole(
    acc, m, total, stages, results, packed, head, q_start, q_len,
    GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store out and lse of half a tile, through shared memory for 16-byte stores.

    stages: of each part of acc, which may be one and the same.
    """
    OUT, LSE, SINKS, _, _, out_token, out_head, lse_token = results
    r = packed + gl.arange(0, HALF, m.type.layout)
    heads = head * GROUP + r % GROUP
    real = r < q_len * GROUP
    if SINKS is not None:
        sink = gl.load(SINKS + heads, mask=real, other=0.0) * LOG2E
        m_new = gl.maximum(m, sink)
        shrink = gl.exp2(m - m_new)
        total = total * shrink + gl.exp2(sink - m_new)
        factor = shrink / total
        m = m_new
    else:
        factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    if LSE is not None:
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * LN2)
        token = (q_start + r // GROUP).to(gl.int64)
        gl.store(LSE + token * lse_token + heads, lse, mask=real)
    acc = rescaled(acc, factor)
    BLOCK_D: gl.constexpr = acc[0].shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    at = (q_start + r // GROUP).to(gl.int64) * out_token + (head * GROUP + r % GROUP) * out_head
    for part in gl.static_range(len(acc)):
        stages[part].store(acc[part].to(OUT.dtype.element_ty))
        d = part * BLOCK_D + gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
        inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
        gl.store(OUT + at[:, None] + d[None, :], stages[part].load(wide), mask=inside)
