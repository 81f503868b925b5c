"""Parts of prefill_hopper: what a consumer does with one tile, and the softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# The running maximum of a query that has seen no key: finite, so that no difference is NaN.
NOTHING = gl.constexpr(-1.0e30)
HALF = gl.constexpr(64)  # packed query rows of a consumer: half a tile


@gluon.jit
def softmax(
    s, m, total, start, limit, position, scale, softcap,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a block -> its weights, the new maximum and sum, what to shrink sums by."""
    if SOFTCAP:
        doubled = s * (2.0 * scale / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + gl.exp2(doubled)))
        scale = 1.0
    if MASKED:
        key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        seen = key[None, :] <= limit[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    alpha = gl.exp2(m - top)
    return p, top, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def scores_of(q, k, BLOCK_N: gl.constexpr):
    """Starts q k^T."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, layout),
        use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def visit(
    q, keys, values, k_full, k_empty, v_full, v_empty, turn, block, step, start,
    p, acc, m, total, limit, position, scale, softcap,
    g: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Products of block `block` with q, and of the block before it with its weights p."""
    stage, phase = block % STAGES, (block // STAGES) & 1
    before, phase_before = (block - 1) % STAGES, ((block - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    if TURNS:
        mbarrier.wait(turn.index(g), (step & 1) ^ (1 - g))
    s = scores_of(q, keys.index(stage), BLOCK_N)
    mbarrier.wait(v_full.index(before), phase_before)
    product = warpgroup_mma(p, values.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - g), count=1)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, m, total, alpha = softmax(
        s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, MASKED
    )
    weights = gl.convert_layout(weights.to(q.dtype), p.type.layout)
    # A loop, though one that ends at once: the assembler would move the wait for the product up to
    # before the exponentials, which then had nothing to run beside.
    mbarrier.wait(v_full.index(before), phase_before)
    acc, weights, alpha = warpgroup_mma_wait(num_outstanding=0, deps=(product, weights, alpha))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return weights, acc, m, total


@gluon.jit
def clear_tail(v, start, kv_len, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zero the values of keys from kv_len on: there may be NaN, and 0 * NaN is NaN.

    Both consumers do it, each before it reads: what they write is the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    for j in gl.static_range(BLOCK_N // 16):
        if start + j * 16 + 16 > kv_len:
            rows = v.slice(j * 16, 16, 0)
            key = start + j * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            rows.store(gl.where((key < kv_len)[:, None], rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def write_whole(
    acc, m, total, stage, OUT, LSE, SINKS, packed, head, q_start, q_len,
    out_token, out_head, lse_token, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """out and lse of half a tile; through shared memory, so that stores are 16 bytes wide."""
    r = packed + gl.arange(0, HALF, m.type.layout)
    heads = head * GROUP + r % GROUP
    real = r < q_len * GROUP
    if SINKS is not None:
        sink = gl.load(SINKS + heads, mask=real, other=0.0) * LOG2E
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        total = total * shrink + gl.exp2(sink - top)
        factor = shrink / total
        m = top
    else:
        factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    if LSE is not None:
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * LN2)
        token = (q_start + r // GROUP).to(gl.int64)
        gl.store(LSE + token * lse_token + heads, lse, mask=real)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    stage.store(acc.to(OUT.dtype.element_ty))
    BLOCK_D: gl.constexpr = acc.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    at = (q_start + r // GROUP).to(gl.int64) * out_token + (head * GROUP + r % GROUP) * out_head
    inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
    gl.store(OUT + at[:, None] + d[None, :], stage.load(wide), mask=inside)


@gluon.jit
def write_partial(acc, m, total, PARTIAL_OUT, PARTIAL_LSE, slot, real, D: gl.constexpr):
    """The result of a piece of a tile's KV, for merge_tiles.py; slot [64] int64."""
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
    gl.store(PARTIAL_LSE + slot, lse, mask=real)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc / gl.convert_layout(some, rows)[:, None]
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = gl.convert_layout(slot, rows)[:, None] * D + d[None, :]
    inside = gl.convert_layout(real, rows)[:, None] & (d < D)[None, :]
    gl.store(PARTIAL_OUT + at, acc, mask=inside)
