"""The producer warp of prefill_hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from attention.prefill.prefill_hopper_tile import AT_K, AT_Q, AT_V, FIELDS, HALF

# Bytes of K and V in use at a time, which stay in the L2 cache.
CACHED = gl.constexpr(20 << 20)


@gluon.jit
def _section_heads(tokens, KV_HEADS: gl.constexpr, BLOCK_D: gl.constexpr):
    """KV heads of a section, with `tokens` KV positions each.

    K and V of more heads would be evicted from the L2 cache between the programs that share them.
    """
    return gl.minimum(gl.maximum(CACHED // (4 * BLOCK_D) // gl.maximum(tokens, 1), 1), KV_HEADS)


@gluon.jit
def _item_and_head(w, items, section_heads, KV_HEADS: gl.constexpr):
    """Work w -> (item, head): all items of a section of heads, then of the next section."""
    section = w // (items * section_heads)
    first = section * section_heads
    heads = gl.minimum(section_heads, KV_HEADS - first)
    w -= first * items
    return w // heads, first + w % heads


@gluon.jit
def _load_block(
    tma_desc, tiles, full, empty, block, table, start, bottom, end, head, num_pages,
    AT: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block's pages into the next stage of K or V.

    A page that no query sees is loaded as zeros, from past the pool's end: its entry in the page
    table may be junk.
    """
    BLOCK_D: gl.constexpr = tma_desc.block_type.shape[3]
    stage = block % STAGES
    mbarrier.wait(empty.index(AT + stage), ((block // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(AT + stage), BLOCK_N // PAGE * tma_desc.block_type.nbytes)
    tile = tiles.index(stage).reshape([1, 1, BLOCK_N, BLOCK_D])
    for j in gl.static_range(BLOCK_N // PAGE):
        key = start + j * PAGE
        valid = (key < end) & (key + PAGE > bottom)
        page = gl.load(table + start // PAGE + j, mask=valid, other=num_pages)
        tma.async_copy_global_to_shared(
            tma_desc, [page, head, 0, 0], full.index(AT + stage), tile.slice(j * PAGE, PAGE, 2)
        )


@gluon.jit
def _bottom(tile, q_len, kv_len, GROUP: gl.constexpr, WINDOW: gl.constexpr):
    """The first key that any query of the tile sees."""
    bottom = 0
    if WINDOW > 0:
        bottom = gl.maximum(kv_len - q_len + tile * (2 * HALF) // GROUP + 1 - WINDOW, 0)
    return bottom


@gluon.jit
def _publish_item(current, empty, taken, w, item):
    """Pass the next item to the consumers once its slot is free; w is -1 at the end."""
    slot = taken % 2
    for g in gl.static_range(2):
        mbarrier.wait(empty.index(AT_Q + slot * 2 + g), ((taken // 2) & 1) ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    current.index(slot * FIELDS).store(gl.full([1], w, gl.int32, one))
    for j in gl.static_range(1, FIELDS):
        value = gl.full([1], gl.load(item + j), gl.int32, one)
        current.index(slot * FIELDS + j).store(value)


@gluon.jit
def _load_queries(tma_desc, tiles, full, slot, token, head, GROUP: gl.constexpr):
    """Start the copy of both halves of a tile of Q; None: the consumers load it."""
    for g in gl.static_range(2):
        ready = full.index(AT_Q + slot * 2 + g)
        if tma_desc is None:
            mbarrier.arrive(ready, count=1)
        else:
            tile = tiles.index(slot * 2 + g).reshape([HALF // GROUP, GROUP, tiles.shape[2]])
            mbarrier.expect(ready, tma_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                tma_desc, [token + g * (HALF // GROUP), head * GROUP, 0], ready, tile
            )


@gluon.jit
def produce(
    tma_desc, buffers, full, empty, current, TABLE, ITEMS, COUNTS, QUEUE, table_row, num_pages,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Take items from the queue and load their Q, K and V; K and V in descending order."""
    q_desc, k_desc, v_desc = tma_desc
    queries, keys, values, _ = buffers
    items = gl.load(COUNTS)
    work = items * KV_HEADS
    section_heads = _section_heads(gl.load(COUNTS + 2), KV_HEADS, keys.shape[2])
    w = gl.atomic_add(QUEUE, 1)
    block, taken = 0, 0
    while w < work:
        index, head = _item_and_head(w, items, section_heads, KV_HEADS)
        item = ITEMS + index * FIELDS
        row, tile = gl.load(item), gl.load(item + 1)
        first, end = gl.load(item + 2), gl.load(item + 3)
        q_start, q_len, kv_len = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
        _publish_item(current, empty, taken, index * KV_HEADS + head, item)
        token = q_start + tile * (2 * HALF // GROUP)
        _load_queries(q_desc, queries, full, taken % 2, token, head, GROUP)
        taken += 1
        bottom = _bottom(tile, q_len, kv_len, GROUP, WINDOW)
        table = TABLE + row.to(gl.int64) * table_row
        start = first + gl.maximum(gl.cdiv(end - first, BLOCK_N) - 1, 0) * BLOCK_N
        for last in gl.static_range(2):
            while start >= first + (1 - last) * BLOCK_N:
                _load_block(
                    k_desc, keys, full, empty, block, table, start, bottom, end, head, num_pages,
                    AT_K, PAGE, BLOCK_N, STAGES,
                )  # fmt: skip
                _load_block(
                    v_desc, values, full, empty, block, table, start, bottom, end, head, num_pages,
                    AT_V, PAGE, BLOCK_N, STAGES,
                )  # fmt: skip
                block += 1
                start -= BLOCK_N
            if last == 0:
                # The atomic's latency overlaps the last block.  If it were issued when the item
                # begins, programs that start early would take the others' items.
                w = gl.atomic_add(QUEUE, 1)
    _publish_item(current, empty, taken, -1, ITEMS)
    _load_queries(None, queries, full, taken % 2, 0, 0, GROUP)
    if w == work + gl.num_programs(0) - 1:  # each program takes one number past the end
        gl.store(QUEUE, 0)  # the last one resets the queue for the next layer
    if OVERLAP:
        gdc_wait()  # this kernel's end implies the end of both
