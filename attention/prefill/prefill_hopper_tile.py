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

from attention.common.softmax import LOG2E, M_INIT
from attention.prefill.prefill_hopper_stages import (
    AT_K,
    AT_V,
    HALF,
    await_block,
    release,
    stage_of,
    tile_of,
)


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
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr, ROW_SCALES: gl.constexpr,
):  # fmt: skip
    """Scores of a block -> (softmax weights, new maximum, new sum, rescaling factor alpha).

    scale: of the scores to logits in base 2, with ROW_SCALES one for each row.
    """
    factor = scale
    if ROW_SCALES:
        factor = scale[:, None]
    if SOFTCAP:
        doubled = s * (2.0 * factor / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + gl.exp2(doubled)))
        factor, scale = 1.0, 1.0
    if MASKED:
        key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = _mask_above(s, key[None, :], limit[:, None])
        if WINDOW > 0:
            s = _mask_above(s, position[:, None], key[None, :] + (WINDOW - 1))
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * factor - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _start_scores(q, keys, block, stage, PARTS: gl.constexpr):
    """Start q k^T of a block asynchronously; stage: of its first part."""
    BLOCK_N: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = keys.index(stage).permute((1, 0))
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
    s = warpgroup_mma(q[0], k, zeros, use_acc=False, is_async=True)
    for part in gl.static_range(1, PARTS):
        k = tile_of(keys, block, part, PARTS).permute((1, 0))
        s = warpgroup_mma(q[part], k, s, is_async=True)
    return s


@gluon.jit
def _start_values(p, acc, values, full, block, PARTS: gl.constexpr):
    """Wait for V, and start acc + p v asynchronously, one product for each part of V's columns."""
    await_block(full, block, AT_V, values.shape[0] // PARTS)
    products = ()
    for part in gl.static_range(PARTS):
        v = tile_of(values, block, part, PARTS)
        products = products + (warpgroup_mma(p, v, acc[part], is_async=True),)  # noqa: RUF005
    return products


@gluon.jit
def add_last_values(p, acc, values, full, empty, block, PARTS: gl.constexpr):
    """The p v of an item's last block, which nothing overlaps -> acc."""
    products = _start_values(p, acc, values, full, block, PARTS)
    if PARTS == 1:
        acc = (warpgroup_mma_wait(num_outstanding=0, deps=products),)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=products)
    release(empty, block, AT_V, values.shape[0] // PARTS)
    return acc


@gluon.jit
def rescaled(acc, factor):
    """Each part of acc, times a factor for each row."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc[0].type.layout))[:, None]
    results = ()
    for part in gl.static_range(len(acc)):
        results = results + (acc[part] * factor,)  # noqa: RUF005
    return results


@gluon.jit
def _attend_block(
    q, keys, values, full, empty, ping_pong_barrier, block, step, start,
    p, acc, m, total, limit, position, scale, softcap,
    g: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr, ROW_SCALES: gl.constexpr,
):  # fmt: skip
    """q k^T of block `block`, overlapped with p v of the block before it."""
    STAGES: gl.constexpr = keys.shape[0] // PARTS
    await_block(full, block, AT_K, STAGES)
    stage = stage_of(keys, block, 0, PARTS)
    mbarrier.wait(ping_pong_barrier.index(g), (step & 1) ^ (1 - g))
    s = _start_scores(q, keys, block, stage, PARTS)
    products = _start_values(p, acc, values, full, block - 1, PARTS)
    mbarrier.arrive(ping_pong_barrier.index(1 - g), count=1)
    s = warpgroup_mma_wait(num_outstanding=PARTS, deps=(s,))
    release(empty, block, AT_K, STAGES)
    weights, m, total, alpha = _softmax(
        s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, MASKED, ROW_SCALES
    )
    weights = gl.convert_layout(weights.to(q[0].dtype), p.type.layout)
    # This wait returns at once; without it, the assembler would move the wait for the product
    # before the exponentials, which would then overlap nothing.
    await_block(full, block - 1, AT_V, STAGES)
    waited = warpgroup_mma_wait(num_outstanding=0, deps=(weights, alpha) + products)  # noqa: RUF005
    release(empty, block - 1, AT_V, STAGES)
    return waited[0], rescaled(waited[2:], waited[1]), m, total


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
    g: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ROW_SCALES: gl.constexpr,
):  # fmt: skip
    """An item's blocks in descending order, without the last p v -> p, acc, m, total, block, step.

    block counts the blocks of all items; step does not count each item's first block.
    q and acc are tuples of PARTS parts, of equally many columns.
    """
    BLOCK_N: gl.constexpr = keys.shape[1]
    BLOCK_D: gl.constexpr = keys.shape[2]
    STAGES: gl.constexpr = keys.shape[0] // PARTS
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, narrow)
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    await_block(full, block, AT_K, STAGES)
    stage = stage_of(keys, block, 0, PARTS)
    # Not prefetched during the previous item: the assembler of CUDA 12.8 computes the address of q
    # in one of the loops below and uses it in all, unless it is needed before them.
    s = _start_scores(q, keys, block, stage, PARTS)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(empty, block, AT_K, STAGES)
    _, tile, first, end, _, q_len, kv_len, _ = item
    packed = tile * (2 * HALF) + g * HALF
    position = kv_len - q_len + (packed + gl.arange(0, HALF, rows)) // GROUP
    limit = gl.minimum(position, end - 1)
    steps = _steps(tile, first, end, q_len, kv_len, GROUP, BLOCK_N, WINDOW)
    start = first + (steps[0] + steps[1] + steps[2]) * BLOCK_N
    m = gl.full([HALF], M_INIT, gl.float32, rows)
    total = gl.zeros([HALF], gl.float32, rows)
    acc = ()
    for _ in gl.static_range(PARTS):
        acc = acc + (gl.zeros([HALF, BLOCK_D], gl.float32, wide),)  # noqa: RUF005
    p, m, total, _ = _softmax(
        s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, True, ROW_SCALES
    )
    p = gl.convert_layout(p.to(q[0].dtype), left)
    if (start + BLOCK_N > kv_len) & (kv_len % PAGE != 0):
        await_block(full, block, AT_V, STAGES)
        for part in gl.static_range(PARTS):
            _clear_tail(tile_of(values, block, part, PARTS), start, kv_len)
    block += 1
    for part in gl.static_range(3 if WINDOW > 0 else 2):
        for _ in range(steps[part]):
            start -= BLOCK_N
            p, acc, m, total = _attend_block(
                q, keys, values, full, empty, ping_pong_barrier, block, step, start,
                p, acc, m, total, limit, position, scale, softcap,
                g, PARTS, WINDOW, SOFTCAP, part != 1, ROW_SCALES,
            )  # fmt: skip
            block += 1
            step += 1
    return p, acc, m, total, block, step
