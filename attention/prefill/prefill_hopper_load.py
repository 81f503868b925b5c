"""The producer warp of prefill_hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from attention.prefill.prefill_hopper_stages import (
    AT_FP8,
    AT_K,
    AT_Q,
    AT_V,
    FIELDS,
    HALF,
    barrier_of,
    tile_of,
)

# Bytes of K and V in use at a time, which stay in the L2 cache.
CACHED = gl.constexpr(20 << 20)


@gluon.jit
def _section_heads(tokens, KV_HEADS: gl.constexpr, TOKEN_BYTES: gl.constexpr):
    """KV heads of a section, with `tokens` KV positions each.

    K and V of more heads would be evicted from the L2 cache between the programs that share them.
    """
    return gl.minimum(gl.maximum(CACHED // TOKEN_BYTES // gl.maximum(tokens, 1), 1), KV_HEADS)


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
    tma_desc, tiles, full, empty, block, start, place,
    AT: gl.constexpr, PARTS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block's pages into the next stage of K, V or float8.

    A page that no query sees is loaded as zeros, from past the pool's end: its entry in the page
    table may be junk.
    """
    BOX: gl.constexpr = tma_desc.block_type.shape[2]  # tokens of a page, at most a block
    BLOCK_D: gl.constexpr = tma_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = tiles.shape[1]
    table, bottom, end, head, num_pages = place
    barrier, phase = barrier_of(block, tiles.shape[0] // PARTS)
    ready = full.index(AT + barrier)
    mbarrier.wait(empty.index(AT + barrier), phase ^ 1)
    mbarrier.expect(ready, PARTS * (BLOCK_N // BOX) * tma_desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        tile = tile_of(tiles, block, part, PARTS).reshape([1, 1, BLOCK_N, BLOCK_D])
        for j in gl.static_range(BLOCK_N // BOX):
            key = start + j * BOX
            valid = (key < end) & (key + BOX > bottom)
            page = gl.load(table + key // PAGE, mask=valid, other=num_pages)
            token = key % PAGE if BOX < PAGE else 0
            tma.async_copy_global_to_shared(
                tma_desc, [page, head, token, part * BLOCK_D], ready, tile.slice(j * BOX, BOX, 2)
            )  # fmt: skip


@gluon.jit
def _load_keys_and_values(
    tma_desc, buffers, float8, full, empty, block, start, place,
    PARTS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block's keys, then of its values; float8 for the converting warps."""
    _, k_desc, v_desc = tma_desc
    _, keys, values, _ = buffers
    if len(float8) == 0:
        _load_block(k_desc, keys, full, empty, block, start, place, AT_K, PARTS, PAGE)
        _load_block(v_desc, values, full, empty, block, start, place, AT_V, PARTS, PAGE)
    else:
        tiles, number = float8[0], 2 * block
        _load_block(k_desc, tiles, full, empty, number, start, place, AT_FP8, PARTS, PAGE)
        _load_block(v_desc, tiles, full, empty, number + 1, start, place, AT_FP8, PARTS, PAGE)


@gluon.jit
def _bottom(tile, q_len, kv_len, GROUP: gl.constexpr, WINDOW: gl.constexpr):
    """The first key that any query of the tile sees."""
    bottom = 0
    if WINDOW > 0:
        bottom = gl.maximum(kv_len - q_len + tile * (2 * HALF) // GROUP + 1 - WINDOW, 0)
    return bottom


@gluon.jit
def _publish_item(current, empty, taken, w, item, Q_STAGES: gl.constexpr):
    """Pass the next item to the consumers once its slot is free; w is -1 at the end."""
    slot = taken % Q_STAGES
    for g in gl.static_range(2):
        mbarrier.wait(empty.index(AT_Q + slot * 2 + g), ((taken // Q_STAGES) & 1) ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    current.index(slot * FIELDS).store(gl.full([1], w, gl.int32, one))
    for j in gl.static_range(1, FIELDS):
        value = gl.full([1], gl.load(item + j), gl.int32, one)
        current.index(slot * FIELDS + j).store(value)


@gluon.jit
def _load_queries(
    tma_desc, tiles, full, slot, token, head, PARTS: gl.constexpr, GROUP: gl.constexpr
):
    """Start the copy of both halves of a tile of Q; None: the consumers load it."""
    BLOCK_D: gl.constexpr = tiles.shape[2]
    for g in gl.static_range(2):
        ready = full.index(AT_Q + slot * 2 + g)
        if tma_desc is None:
            mbarrier.arrive(ready, count=1)
        else:
            mbarrier.expect(ready, PARTS * tma_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                tile = tiles.index((slot * 2 + g) * PARTS + part)
                tma.async_copy_global_to_shared(
                    tma_desc, [token + g * (HALF // GROUP), head * GROUP, part * BLOCK_D], ready,
                    tile.reshape([HALF // GROUP, GROUP, BLOCK_D]),
                )  # fmt: skip


@gluon.jit
def _end_conversion(float8, full, empty, blocks, PARTS: gl.constexpr):
    """Tell the converting warps that there is no further block."""
    tiles, last = float8
    barrier, phase = barrier_of(2 * blocks, tiles.shape[0] // PARTS)
    mbarrier.wait(empty.index(AT_FP8 + barrier), phase ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    last.index(barrier).store(gl.full([1], 1, gl.int32, one))
    mbarrier.arrive(full.index(AT_FP8 + barrier), count=1)


@gluon.jit
def produce(
    source, buffers, float8, full, empty, current,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr,
    WINDOW: gl.constexpr, KEYS_FIRST: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Take items from the queue and load their Q, K and V; K and V in descending order."""
    tma_desc, TABLE, ITEMS, COUNTS, QUEUE, table_row, num_pages = source
    q_desc, k_desc, v_desc = tma_desc
    queries, keys, values, _ = buffers
    BLOCK_N: gl.constexpr = keys.shape[1]
    BOX_BYTES: gl.constexpr = k_desc.block_type.nbytes
    TOKEN_BYTES: gl.constexpr = 2 * PARTS * BOX_BYTES // k_desc.block_type.shape[2]
    Q_STAGES: gl.constexpr = queries.shape[0] // (2 * PARTS)
    items = gl.load(COUNTS)
    work = items * KV_HEADS
    section_heads = _section_heads(gl.load(COUNTS + 2), KV_HEADS, TOKEN_BYTES)
    w = gl.atomic_add(QUEUE, 1)
    block, taken = 0, 0
    while w < work:
        index, head = _item_and_head(w, items, section_heads, KV_HEADS)
        item = ITEMS + index * FIELDS
        row, tile = gl.load(item), gl.load(item + 1)
        first, end = gl.load(item + 2), gl.load(item + 3)
        q_start, q_len, kv_len = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
        _publish_item(current, empty, taken, index * KV_HEADS + head, item, Q_STAGES)
        token = q_start + tile * (2 * HALF // GROUP)
        _load_queries(q_desc, queries, full, taken % Q_STAGES, token, head, PARTS, GROUP)
        taken += 1
        bottom = _bottom(tile, q_len, kv_len, GROUP, WINDOW)
        place = (TABLE + row.to(gl.int64) * table_row, bottom, end, head, num_pages)
        start = first + gl.maximum(gl.cdiv(end - first, BLOCK_N) - 1, 0) * BLOCK_N
        if KEYS_FIRST:
            # Stages are free again in the order of the products: keys of a block, values of the
            # block before.
            _load_block(k_desc, keys, full, empty, block, start, place, AT_K, PARTS, PAGE)
            while start > first:
                start -= BLOCK_N
                _load_block(k_desc, keys, full, empty, block + 1, start, place, AT_K, PARTS, PAGE)
                _load_block(
                    v_desc, values, full, empty, block, start + BLOCK_N, place, AT_V, PARTS, PAGE
                )
                block += 1
            w = gl.atomic_add(QUEUE, 1)  # its latency overlaps the last values
            _load_block(v_desc, values, full, empty, block, start, place, AT_V, PARTS, PAGE)
            block += 1
        else:
            for last in gl.static_range(2):
                while start >= first + (1 - last) * BLOCK_N:
                    _load_keys_and_values(
                        tma_desc, buffers, float8, full, empty, block, start, place, PARTS, PAGE
                    )
                    block += 1
                    start -= BLOCK_N
                if last == 0:
                    # The atomic's latency overlaps the last block.  If it were issued when the item
                    # begins, programs that start early would take the others' items.
                    w = gl.atomic_add(QUEUE, 1)
    _publish_item(current, empty, taken, -1, ITEMS, Q_STAGES)
    _load_queries(None, queries, full, taken % Q_STAGES, 0, 0, PARTS, GROUP)
    if len(float8) > 0:
        _end_conversion(float8, full, empty, block, PARTS)
    if w == work + gl.num_programs(0) - 1:  # each program takes one number past the end
        gl.store(QUEUE, 0)  # the last one resets the queue for the next layer
    if OVERLAP:
        gdc_wait()  # this kernel's end implies the end of both
