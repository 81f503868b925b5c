"""Device functions of varlen_hopper's consumer warpgroups.

A head of 72 or 80 values has two tiles of Q, K, V and the output, as tuples: of 64 columns, and of
a rest of 16.  A head of 64 has one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.common.softmax import M_INIT
from attention.prefill.prefill_hopper_stages import AT_K, AT_V, HALF, await_block, release


@gluon.jit
def _softmax(s, m, total, factor):
    """Scores of a block -> (softmax weights, new maximum, new sum, rescaling factor alpha).

    factor: of the scores to logits in base 2
    """
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _start_scores(q, keys, stage):
    """Start q k^T of a block asynchronously."""
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
    k = keys[0].index(stage).permute((1, 0))
    s = warpgroup_mma(q[0], k, zeros, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(keys)):
        s = warpgroup_mma(q[part], keys[part].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_product(p, v, acc):
    """Start acc + p v asynchronously, whatever columns v has."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(p, left, assert_trivial=True), v, acc, is_async=True)


@gluon.jit
def _start_values(p, acc, values, full, block):
    """Wait for V, and start acc + p v asynchronously, a product for each part."""
    STAGES: gl.constexpr = values[0].shape[0]
    await_block(full, block, AT_V, STAGES)
    products = ()
    for part in gl.static_range(len(values)):
        v = values[part].index(block % STAGES)
        products = products + (_start_product(p, v, acc[part]),)  # noqa: RUF005
    return products


@gluon.jit
def _times(acc, factor):
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, rows, assert_trivial=True)[:, None]


@gluon.jit
def _rescaled(acc, factor):
    """Each part of acc, times a factor for each row."""
    results = ()
    for part in gl.static_range(len(acc)):
        results = results + (_times(acc[part], factor),)  # noqa: RUF005
    return results


@gluon.jit
def add_last_values(p, acc, values, full, empty, block):
    """The p v of a tile's last block, which nothing overlaps -> acc."""
    products = _start_values(p, acc, values, full, block)
    if len(acc) == 1:
        acc = (warpgroup_mma_wait(num_outstanding=0, deps=products),)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=products)
    release(empty, block, AT_V, values[0].shape[0])
    return acc


@gluon.jit
def _attend_block(
    q, keys, values, full, empty, ping_pong_barrier, block, step, p, acc, m, total, factor,
    g: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """q k^T of block `block`, overlapped with p v of the block before it."""
    STAGES: gl.constexpr = keys[0].shape[0]
    await_block(full, block, AT_K, STAGES)
    mbarrier.wait(ping_pong_barrier.index(g), (step & 1) ^ (g == 0))
    s = _start_scores(q, keys, block % STAGES)
    products = _start_values(p, acc, values, full, block - 1)
    mbarrier.arrive(ping_pong_barrier.index((g + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(num_outstanding=len(values), deps=(s,))
    release(empty, block, AT_K, STAGES)
    weights, m, total, alpha = _softmax(s, m, total, factor)
    weights = gl.convert_layout(weights.to(p.dtype), p.type.layout, assert_trivial=True)
    # This wait returns at once; without it, the assembler would move the wait for the product
    # before the exponentials, which would then overlap nothing.
    await_block(full, block - 1, AT_V, STAGES)
    waited = warpgroup_mma_wait(num_outstanding=0, deps=(weights, alpha) + products)  # noqa: RUF005
    release(empty, block - 1, AT_V, STAGES)
    return waited[0], _rescaled(waited[2:], waited[1]), m, total


@gluon.jit
def _clear_tail(v, start, end):
    """Zero the values of rows from `end` on, which are of the next sequence: its NaN would count.

    All consumers do it before they read, and write the same.
    """
    COLUMNS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    for j in gl.static_range(v.shape[0] // 64):
        if start + j * 64 + 64 > end:
            rows = v.slice(j * 64, 64, 0)
            row = start + j * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            rows.store(gl.where((row < end)[:, None], rows.load(layout), 0.0))


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    """A part of the output."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([HALF, COLUMNS], gl.float32, wide)


@gluon.jit
def attend(
    q, keys, values, full, empty, ping_pong_barrier, block, step, begin, end, factor,
    g: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """A sequence's blocks in descending order, without the last p v -> p, acc, total, block, step.

    block counts the blocks of all tiles; step does not count each tile's first block, the only one
    that is masked.
    """
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    STAGES: gl.constexpr = keys[0].shape[0]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, narrow)
    steps = gl.cdiv(end - begin, BLOCK_N) - 1
    start = begin + steps * BLOCK_N
    await_block(full, block, AT_K, STAGES)
    s = _start_scores(q, keys, block % STAGES)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(empty, block, AT_K, STAGES)
    key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, narrow))
    s = gl.where((key < end)[None, :], s, float("-inf"))
    m = gl.full([HALF], M_INIT, gl.float32, rows)
    total = gl.zeros([HALF], gl.float32, rows)
    acc = ()
    for part in gl.static_range(len(values)):
        acc = acc + (_zeros(values[part].shape[2]),)  # noqa: RUF005
    p, m, total, _ = _softmax(s, m, total, factor)
    left: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    p = gl.convert_layout(p.to(q[0].dtype), left, assert_trivial=True)
    if start + BLOCK_N > end:
        await_block(full, block, AT_V, STAGES)
        for part in gl.static_range(len(values)):
            _clear_tail(values[part].index(block % STAGES), start, end)
        fence_async_shared()
    block += 1
    for _ in range(steps):
        p, acc, m, total = _attend_block(
            q, keys, values, full, empty, ping_pong_barrier, block, step, p, acc, m, total, factor,
            g, CONSUMERS,
        )  # fmt: skip
        block += 1
        step += 1
    return p, acc, total, block, step


@gluon.jit
def _store(acc, OUT, row, end, head, FIRST: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    r = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    at = (r.to(gl.int64) * HEADS + head)[:, None] * D + d[None, :]
    inside = (r < end)[:, None] & (d < D)[None, :]
    gl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=inside)


@gluon.jit
def write(acc, total, OUT, row, end, head, HEADS: gl.constexpr, D: gl.constexpr):
    """Store the output of the rows from `row` on, before `end`: two numbers a thread and store."""
    acc = _rescaled(acc, 1.0 / total)
    for part in gl.static_range(len(acc)):
        _store(acc[part], OUT, row, end, head, part * acc[0].shape[1], HEADS, D)
