"""Device functions of prefill_hopper's consumer warpgroups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.common.softmax import LN2, LOG2E, M_INIT

HALF = gl.constexpr(64)  # packed query rows of a consumer: half a tile
FIELDS = gl.constexpr(8)  # of an item
# Offsets of the barriers of Q, K and V in the arrays `full` and `empty`.  Two arrays only, since
# the address of each takes a register.
AT_Q = gl.constexpr(0)
AT_K = gl.constexpr(4)
AT_V = gl.constexpr(8)


@gluon.jit
def _mask_above(s, number, limit):
    """s, with -inf where number > limit.

    In assembly, two instructions per score: the compiler would pack the results of many comparisons
    into bits of registers and unpack them again.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p;}",
        "=f,f,r,r", [s, number, limit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax(
    s, m, total, start, limit, position, scale, softcap,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a block -> (softmax weights, new maximum, new sum, rescaling factor alpha)."""
    if SOFTCAP:
        doubled = s * (2.0 * scale / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + gl.exp2(doubled)))
        scale = 1.0
    if MASKED:
        key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = _mask_above(s, key[None, :], limit[:, None])
        if WINDOW > 0:
            s = _mask_above(s, position[:, None], key[None, :] + (WINDOW - 1))
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _scores_of(q, k, BLOCK_N: gl.constexpr):
    """Start q k^T asynchronously."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, layout),
        use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _attend_block(
    q, keys, values, full, empty, ping_pong_barrier, block, step, start,
    p, acc, m, total, limit, position, scale, softcap,
    g: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """q k^T of block `block`, overlapped with p v of the block before it."""
    stage, phase = block % STAGES, (block // STAGES) & 1
    before, phase_before = (block - 1) % STAGES, ((block - 1) // STAGES) & 1
    mbarrier.wait(full.index(AT_K + stage), phase)
    if PING_PONG:
        mbarrier.wait(ping_pong_barrier.index(g), (step & 1) ^ (1 - g))
    s = _scores_of(q, keys.index(stage), BLOCK_N)
    mbarrier.wait(full.index(AT_V + before), phase_before)
    product = warpgroup_mma(p, values.index(before), acc, is_async=True)
    if PING_PONG:
        mbarrier.arrive(ping_pong_barrier.index(1 - g), count=1)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    mbarrier.arrive(empty.index(AT_K + stage), count=1)
    weights, m, total, alpha = _softmax(
        s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, MASKED
    )
    weights = gl.convert_layout(weights.to(q.dtype), p.type.layout)
    # This wait returns at once; without it, the assembler would move the wait for the product
    # before the exponentials, which would then overlap nothing.
    mbarrier.wait(full.index(AT_V + before), phase_before)
    acc, weights, alpha = warpgroup_mma_wait(num_outstanding=0, deps=(product, weights, alpha))
    mbarrier.arrive(empty.index(AT_V + before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return weights, acc, m, total


@gluon.jit
def _clear_tail(v, start, kv_len):
    """Zero the values of keys from kv_len on: they may be NaN, and 0 * NaN is NaN.

    Both consumers do it before they read, and write the same.
    """
    BLOCK_D: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    for j in gl.static_range(v.shape[0] // 16):
        if start + j * 16 + 16 > kv_len:
            rows = v.slice(j * 16, 16, 0)
            key = start + j * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            rows.store(gl.where((key < kv_len)[:, None], rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _steps(tile, first, end, q_len, kv_len, GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
           WINDOW: gl.constexpr):  # fmt: skip
    """-> steps after the first: masked at the diagonal, unmasked, masked at the window's start."""
    after_first = gl.maximum(gl.cdiv(end - first, BLOCK_N) - 1, 0)
    lowest = kv_len - q_len + tile * (2 * HALF) // GROUP  # position of the tile's first query
    whole = gl.maximum(gl.minimum(lowest + 1, end) - first, 0) // BLOCK_N
    whole = gl.minimum(whole, after_first)
    partly = 0
    if WINDOW > 0:
        last = (tile * (2 * HALF) + 2 * HALF - 1) // GROUP
        highest = gl.minimum(kv_len - q_len + last, kv_len - 1)
        partly = gl.cdiv(gl.maximum(highest + 1 - WINDOW - first, 0), BLOCK_N)
        partly = gl.minimum(partly, after_first)
        whole = gl.maximum(whole, partly)
    return after_first - whole, whole - partly, partly


@gluon.jit
def attend(
    item, q, keys, values, full, empty, ping_pong_barrier, block, step, scale, softcap,
    g: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """An item's blocks in descending order, without the last p v -> p, acc, m, total, block, step.

    block counts the blocks of all items; step does not count each item's first block.
    """
    BLOCK_D: gl.constexpr = keys.shape[2]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, narrow)
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    stage, phase = block % STAGES, (block // STAGES) & 1
    mbarrier.wait(full.index(AT_K + stage), phase)
    # Not prefetched during the previous item: the assembler of CUDA 12.8 computes the address of q
    # in one of the loops below and uses it in all, unless it is needed before them.
    s = warpgroup_mma_wait(num_outstanding=0, deps=(_scores_of(q, keys.index(stage), BLOCK_N),))
    mbarrier.arrive(empty.index(AT_K + stage), count=1)
    _, tile, first, end, _, q_len, kv_len, _ = item
    packed = tile * (2 * HALF) + g * HALF
    position = kv_len - q_len + (packed + gl.arange(0, HALF, rows)) // GROUP
    limit = gl.minimum(position, end - 1)
    steps = _steps(tile, first, end, q_len, kv_len, GROUP, BLOCK_N, WINDOW)
    start = first + (steps[0] + steps[1] + steps[2]) * BLOCK_N
    m = gl.full([HALF], M_INIT, gl.float32, rows)
    total = gl.zeros([HALF], gl.float32, rows)
    acc = gl.zeros([HALF, BLOCK_D], gl.float32, wide)
    p, m, total, _ = _softmax(
        s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, True
    )
    p = gl.convert_layout(p.to(q.dtype), left)
    if (start + BLOCK_N > kv_len) & (kv_len % PAGE != 0):
        mbarrier.wait(full.index(AT_V + stage), phase)
        _clear_tail(values.index(stage), start, kv_len)
    block += 1
    for part in gl.static_range(3 if WINDOW > 0 else 2):
        for _ in range(steps[part]):
            start -= BLOCK_N
            p, acc, m, total = _attend_block(
                q, keys, values, full, empty, ping_pong_barrier, block, step, start,
                p, acc, m, total, limit, position, scale, softcap,
                g, BLOCK_N, STAGES, WINDOW, SOFTCAP, part != 1, PING_PONG,
            )  # fmt: skip
            block += 1
            step += 1
    return p, acc, m, total, block, step


@gluon.jit
def write_whole(
    acc, m, total, stage, results, packed, head, q_start, q_len,
    GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store out and lse of half a tile, through shared memory for 16-byte stores."""
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
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    stage.store(acc.to(OUT.dtype.element_ty))
    BLOCK_D: gl.constexpr = acc.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    at = (q_start + r // GROUP).to(gl.int64) * out_token + (head * GROUP + r % GROUP) * out_head
    inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
    gl.store(OUT + at[:, None] + d[None, :], stage.load(wide), mask=inside)
