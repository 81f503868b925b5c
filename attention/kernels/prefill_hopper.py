"""Prefill attention for Hopper (sm_90), in Gluon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.hopper_tile import (
    HALF,
    LOG2E,
    NOTHING,
    clear_tail,
    scores_of,
    softmax,
    visit,
    write_partial,
    write_whole,
)
from attention.kernels.merge_tiles import merge_tiles
from attention.planner.tiles import TilePlan


@gluon.jit
def _load_block(
    boxes, tiles, full, empty, block, table, start, bottom, end, head, num_pages,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block's pages into the next stage of K or V.

    In place of a page that no query sees there are zeros: its entry in the table may be junk, and
    of a page past the pool's end nothing is read.
    """
    BLOCK_D: gl.constexpr = boxes.block_type.shape[3]
    stage = block % STAGES
    mbarrier.wait(empty.index(stage), ((block // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N // PAGE * boxes.block_type.nbytes)
    tile = tiles.index(stage).reshape([1, 1, BLOCK_N, BLOCK_D])
    for j in gl.static_range(BLOCK_N // PAGE):
        key = start + j * PAGE
        there = (key < end) & (key + PAGE > bottom)
        page = gl.load(table + start // PAGE + j, mask=there, other=num_pages)
        tma.async_copy_global_to_shared(
            boxes, [page, head, 0, 0], full.index(stage), tile.slice(j * PAGE, PAGE, 2)
        )


@gluon.jit
def _bottom(tile, q_len, kv_len, GROUP: gl.constexpr, WINDOW: gl.constexpr):
    """The first key that any query of the tile sees."""
    bottom = 0
    if WINDOW > 0:
        bottom = gl.maximum(kv_len - q_len + tile * (2 * HALF) // GROUP + 1 - WINDOW, 0)
    return bottom


@gluon.jit
def _announce(current, w, item):
    """Tell the consumers which item is next; -1: none."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    current.index(0).store(gl.full([1], w, gl.int32, one))
    for j in gl.static_range(1, 8):
        current.index(j).store(gl.full([1], gl.load(item + j), gl.int32, one))


@gluon.jit
def _produce(
    q_boxes, k_boxes, v_boxes, q_tiles, keys, values, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, current, TABLE, ITEMS, COUNTS, QUEUE, table_row, num_pages,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The load warp: takes items from the queue and loads their Q, K and V, K and V backwards."""
    work = gl.load(COUNTS) * KV_HEADS
    w = gl.atomic_add(QUEUE, 1)
    block, taken = 0, 0
    while w < work:
        following = gl.atomic_add(QUEUE, 1)  # asked for early: the answer takes a while
        item, head = ITEMS + w // KV_HEADS * 8, w % KV_HEADS
        row, tile = gl.load(item), gl.load(item + 1)
        first, end = gl.load(item + 2), gl.load(item + 3)
        q_start, q_len, kv_len = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
        for g in gl.static_range(2):
            mbarrier.wait(q_empty.index(g), (taken & 1) ^ 1)
        _announce(current, w, item)
        for g in gl.static_range(2):
            if q_boxes is None:
                mbarrier.arrive(q_full.index(g), count=1)
            else:
                mbarrier.expect(q_full.index(g), q_boxes.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_boxes, [q_start + (tile * 2 + g) * (HALF // GROUP), head * GROUP, 0],
                    q_full.index(g),
                    q_tiles.index(g).reshape([HALF // GROUP, GROUP, q_tiles.shape[2]]),
                )  # fmt: skip
        taken += 1
        bottom = _bottom(tile, q_len, kv_len, GROUP, WINDOW)
        table = TABLE + row.to(gl.int64) * table_row
        start = first + gl.maximum(gl.cdiv(end - first, BLOCK_N) - 1, 0) * BLOCK_N
        while start >= first:
            _load_block(
                k_boxes, keys, k_full, k_empty, block, table, start, bottom, end, head,
                num_pages, PAGE, BLOCK_N, STAGES,
            )  # fmt: skip
            _load_block(
                v_boxes, values, v_full, v_empty, block, table, start, bottom, end, head,
                num_pages, PAGE, BLOCK_N, STAGES,
            )  # fmt: skip
            block += 1
            start -= BLOCK_N
        w = following
    for g in gl.static_range(2):
        mbarrier.wait(q_empty.index(g), (taken & 1) ^ 1)
    _announce(current, -1, ITEMS)
    for g in gl.static_range(2):
        mbarrier.arrive(q_full.index(g), count=1)
    if w == work + gl.num_programs(0) - 1:  # each program ends with one number too many
        gl.store(QUEUE, 0)  # the last of them: for the next layer


@gluon.jit
def _field(current, j: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(current.index(j).load(layout), 0)


@gluon.jit
def _fetch_queries(
    Q, tile, packed, head, q_start, q_len, q_token, q_head, GROUP: gl.constexpr, D: gl.constexpr
):
    """Half a tile of Q by pointers, where its heads do not make whole boxes."""
    BLOCK_D: gl.constexpr = tile.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    at = (q_start + r // GROUP).to(gl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
    tile.store(gl.load(Q + at[:, None] + d[None, :], mask=inside, other=0.0))
    fence_async_shared()


@gluon.jit
def _steps(tile, first, end, q_len, kv_len, GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
           WINDOW: gl.constexpr):  # fmt: skip
    """Steps after the first: at the diagonal, where every query sees all, at the window's start."""
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
def _consume(
    Q, q_tiles, keys, values, stages, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    current, OUT, LSE, SINKS, PARTIAL_OUT, PARTIAL_LSE, q_token, q_head, out_token, out_head,
    lse_token, scale, softcap,
    g: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Four warps: half of the query rows of each tile."""
    BLOCK_D: gl.constexpr = keys.shape[2]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, narrow)
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    q = q_tiles.index(g)
    scale = scale * LOG2E
    block, taken = 0, 0
    mbarrier.wait(q_full.index(g), 0)
    w = _field(current, 0)
    while w >= 0:
        tile, first, end = _field(current, 1), _field(current, 2), _field(current, 3)
        q_start, q_len = _field(current, 4), _field(current, 5)
        kv_len, partial = _field(current, 6), _field(current, 7)
        head = w % KV_HEADS
        packed = tile * (2 * HALF) + g * HALF
        if Q is not None:
            _fetch_queries(Q, q, packed, head, q_start, q_len, q_token, q_head, GROUP, D)
        position = kv_len - q_len + (packed + gl.arange(0, HALF, rows)) // GROUP
        limit = gl.minimum(position, end - 1)
        diagonal, whole, window = _steps(tile, first, end, q_len, kv_len, GROUP, BLOCK_N, WINDOW)
        start = first + (diagonal + whole + window) * BLOCK_N
        stage, phase = block % STAGES, (block // STAGES) & 1
        m = gl.full([HALF], NOTHING, gl.float32, rows)
        total = gl.zeros([HALF], gl.float32, rows)
        acc = gl.zeros([HALF, BLOCK_D], gl.float32, wide)
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(scores_of(q, keys.index(stage), BLOCK_N),))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, m, total, _ = softmax(
            s, m, total, start, limit, position, scale, softcap, WINDOW, SOFTCAP, True
        )
        p = gl.convert_layout(p.to(q.dtype), left)
        if (start + BLOCK_N > kv_len) & (kv_len % PAGE != 0):
            mbarrier.wait(v_full.index(stage), phase)
            clear_tail(values.index(stage), start, kv_len, BLOCK_N, BLOCK_D)
        block += 1
        for _ in range(diagonal):
            start -= BLOCK_N
            p, acc, m, total = visit(
                q, keys, values, k_full, k_empty, v_full, v_empty, turn, block, block - taken - 1,
                start, p, acc, m, total, limit, position, scale, softcap,
                g, BLOCK_N, STAGES, WINDOW, SOFTCAP, True, TURNS,
            )  # fmt: skip
            block += 1
        for _ in range(whole):
            start -= BLOCK_N
            p, acc, m, total = visit(
                q, keys, values, k_full, k_empty, v_full, v_empty, turn, block, block - taken - 1,
                start, p, acc, m, total, limit, position, scale, softcap,
                g, BLOCK_N, STAGES, WINDOW, SOFTCAP, False, TURNS,
            )  # fmt: skip
            block += 1
        if WINDOW > 0:
            for _ in range(window):
                start -= BLOCK_N
                p, acc, m, total = visit(
                    q, keys, values, k_full, k_empty, v_full, v_empty, turn, block,
                    block - taken - 1, start, p, acc, m, total, limit, position, scale, softcap,
                    g, BLOCK_N, STAGES, WINDOW, SOFTCAP, True, TURNS,
                )  # fmt: skip
                block += 1
        mbarrier.arrive(q_empty.index(g), count=1)
        stage, phase = (block - 1) % STAGES, ((block - 1) // STAGES) & 1
        mbarrier.wait(v_full.index(stage), phase)
        product = warpgroup_mma(p, values.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        if partial != 0:
            r = gl.arange(0, HALF, rows)
            slot = w.to(gl.int64) * (2 * HALF) + g * HALF + r
            write_partial(
                acc, m, total, PARTIAL_OUT, PARTIAL_LSE, slot, packed + r < q_len * GROUP, D
            )
        else:
            write_whole(
                acc, m, total, stages.index(g), OUT, LSE, SINKS, packed, head, q_start, q_len,
                out_token, out_head, lse_token, GROUP, D,
            )  # fmt: skip
        taken += 1
        mbarrier.wait(q_full.index(g), taken & 1)
        w = _field(current, 0)


@gluon.jit(do_not_specialize=["table_row"])
def _prefill_hopper(
    Q, q_boxes, k_boxes, v_boxes, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS,
    ITEMS, COUNTS, QUEUE, q_token, q_head, table_row, num_pages, out_token, out_head, lse_token,
    scale, softcap,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_boxes.block_type.shape[3]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(k_boxes.dtype, [2, HALF, BLOCK_D], swizzled)
    keys = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    values = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    stages = gl.allocate_shared_memory(k_boxes.dtype, [2, HALF, BLOCK_D], swizzled)
    current = gl.allocate_shared_memory(gl.int32, [8, 1], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both consumers release a stage
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                Q, q_tiles, keys, values, stages, q_full, q_empty, k_full, k_empty, v_full,
                v_empty, turn, current, OUT, LSE, SINKS, PARTIAL_OUT, PARTIAL_LSE, q_token, q_head,
                out_token, out_head, lse_token, scale, softcap,
                0, KV_HEADS, GROUP, PAGE, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, TURNS,
            )),
            (_consume, (
                Q, q_tiles, keys, values, stages, q_full, q_empty, k_full, k_empty, v_full,
                v_empty, turn, current, OUT, LSE, SINKS, PARTIAL_OUT, PARTIAL_LSE, q_token, q_head,
                out_token, out_head, lse_token, scale, softcap,
                1, KV_HEADS, GROUP, PAGE, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, TURNS,
            )),
            (_produce, (
                q_boxes, k_boxes, v_boxes, q_tiles, keys, values, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, current, TABLE, ITEMS, COUNTS, QUEUE, table_row, num_pages,
                KV_HEADS, GROUP, PAGE, BLOCK_N, STAGES, WINDOW,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """How the kernel is compiled."""

    block_n: int
    stages: int
    turns: bool  # the consumers start their products in turns


def hopper_config(head_dim: int) -> HopperConfig:
    return HopperConfig(block_n=128, stages=2 if head_dim > 64 else 4, turns=True)


def supports(
    *,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    group: int,
) -> str | None:
    """Why the kernel cannot serve this, or None if it can.

    capability  of the CUDA device; None: a CPU
    """
    if capability is None or capability[0] != 9:
        return "it is made for compute capability 9.0 and runs on no other"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 or float16, not {dtype}"
    if kv_dtype != dtype:
        return f"pages of {kv_dtype} would have to be converted to {dtype} on the way"
    if head_dim % 8 or not 16 < head_dim <= 128:
        return f"head_dim is {head_dim}: it serves multiples of 8 from 24 to 128"
    if page_size not in (16, 32, 64, 128):
        return f"pages of {page_size} tokens: it serves 16, 32, 64 and 128"
    if group > HALF.value:
        return f"{group} query heads share a KV head: it serves up to 64"
    return None


def prefill_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    tiles: TilePlan,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    config: HopperConfig | None = None,
) -> None:
    """As `prefill`, for what `supports` accepts; tiles of 128 packed rows, scale > 0."""
    spec = tiles.spec
    heads, head_dim = q.shape[1:]
    pages, kv_heads, page, _ = k.shape
    group = heads // kv_heads
    assert (kv_heads, group) == (spec.kv_heads, spec.group), "the plan is for other heads"
    assert tiles.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    assert spec.block_m == 2 * HALF.value and spec.block_n % page == 0, "the plan is of other tiles"
    assert k_scale is None and v_scale is None and scale > 0
    assert out.stride(-1) == 1
    config = config or hopper_config(head_dim)
    block_d = 64 if head_dim <= 64 else 128
    boxes, queries = None, q
    if HALF.value % group == 0:
        queries = None
        boxes = _boxes(q, [HALF.value // group, group, block_d])
    _prefill_hopper[(spec.programs,)](
        queries, boxes, _boxes(k, [1, 1, page, block_d]), _boxes(v, [1, 1, page, block_d]),
        page_table, tiles.partial_out, tiles.partial_lse, out, lse, sinks,
        tiles.items, tiles.counts, tiles.queue, q.stride(0), q.stride(1), page_table.stride(0),
        pages, out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), scale, softcap,
        KV_HEADS=kv_heads, GROUP=group, PAGE=page, D=head_dim, BLOCK_N=config.block_n,
        STAGES=config.stages, WINDOW=spec.window, SOFTCAP=softcap > 0, TURNS=config.turns,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    merge_tiles(tiles, out, lse, sinks)


def _boxes(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """What a TMA copies of a tensor at a time; columns that it has not are zeros."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor.from_tensor(tensor, box, layout)
