"""Prefill attention for Hopper (sm_90), in Gluon, warp-specialized as FlashAttention-3.

prefill_hopper
  grid      fixed (plan.spec.programs), so that a graph can replay any step; a program takes the
            next (item, KV head) from the queue, longest items first, in sections of KV heads whose
            K and V fit in the L2 cache
  warps     a producer warp loads Q, K and V by TMA, one box per page (prefill_hopper_load.py); two
            consumer warpgroups attend with half of a tile's rows each (prefill_hopper_tile.py), in
            ping-pong: one runs GEMMs while the other exponentiates; the next tile's Q is prefetched
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            nothing of pages past a row's length, or before a tile's window
  writes    out [T, heads, D], lse [T, heads]; of tiles split along KV partial_out, partial_lse
            as prefill.py
  math      128 packed query rows of one KV head; online softmax in base 2, float32 sums; the
            p v of a block overlaps the exponentials of the next
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  checked   tests/attention/prefill/test_prefill_hopper.py against a float64 oracle
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from attention.common.dependent_launch import dependent_launch
from attention.common.hopper import tma_desc, write_partial
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import LOG2E
from attention.planner.prefill_tiles import TilePlan
from attention.prefill.merge_tiles import merge_tiles
from attention.prefill.prefill_hopper_load import produce
from attention.prefill.prefill_hopper_tile import (
    AT_K,
    AT_Q,
    AT_V,
    FIELDS,
    HALF,
    attend,
    write_whole,
)


@gluon.jit
def _field(current, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(current.index(at).load(layout), 0)


@gluon.jit
def _fetch_queries(
    Q, tile, packed, head, q_start, q_len, q_token, q_head, GROUP: gl.constexpr, D: gl.constexpr
):
    """Load half a tile of Q by pointers, where a group does not divide the TMA box."""
    BLOCK_D: gl.constexpr = tile.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    at = (q_start + r // GROUP).to(gl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
    tile.store(gl.load(Q + at[:, None] + d[None, :], mask=inside, other=0.0))
    fence_async_shared()


@gluon.jit
def _next_item(current, full, taken, g: gl.constexpr):
    """Wait for the next item and its queries -> its fields; the first is -1 at the end."""
    slot = taken % 2
    mbarrier.wait(full.index(AT_Q + slot * 2 + g), (taken // 2) & 1)
    at = slot * FIELDS
    w, tile, first, end = (
        _field(current, at), _field(current, at + 1), _field(current, at + 2),
        _field(current, at + 3),
    )  # fmt: skip
    q_start, q_len, kv_len, partial = (
        _field(current, at + 4), _field(current, at + 5), _field(current, at + 6),
        _field(current, at + 7),
    )  # fmt: skip
    return w, tile, first, end, q_start, q_len, kv_len, partial


@gluon.jit
def _consume(
    Q, buffers, full, empty, ping_pong_barrier, current, results, q_token, q_head, scale, softcap,
    g: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: half of the query rows of each tile."""
    queries, keys, values, stages = buffers
    block, step, taken = 0, 0, 0
    item = _next_item(current, full, taken, g)
    while item[0] >= 0:
        w, tile, q_start, q_len, partial = item[0], item[1], item[4], item[5], item[7]
        head, packed = w % KV_HEADS, tile * (2 * HALF) + g * HALF
        q = queries.index(taken % 2 * 2 + g)
        if Q is not None:
            _fetch_queries(Q, q, packed, head, q_start, q_len, q_token, q_head, GROUP, D)
        p, acc, m, total, block, step = attend(
            item, q, keys, values, full, empty, ping_pong_barrier, block, step, scale * LOG2E,
            softcap,
            g, GROUP, PAGE, BLOCK_N, STAGES, WINDOW, SOFTCAP, PING_PONG,
        )  # fmt: skip
        mbarrier.arrive(empty.index(AT_Q + taken % 2 * 2 + g), count=1)
        stage, phase = (block - 1) % STAGES, ((block - 1) // STAGES) & 1
        mbarrier.wait(full.index(AT_V + stage), phase)
        product = warpgroup_mma(p, values.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(empty.index(AT_V + stage), count=1)
        if partial != 0:
            r = gl.arange(0, HALF, m.type.layout)
            slot = w.to(gl.int64) * (2 * HALF) + g * HALF + r
            real = packed + r < q_len * GROUP
            write_partial(acc, m, total, results[3], results[4], slot, real, D)
        else:
            write_whole(
                acc, m, total, stages.index(g), results, packed, head, q_start, q_len, GROUP, D
            )
        taken += 1
        item = _next_item(current, full, taken, g)


@gluon.jit(do_not_specialize=["table_row", "num_pages"])
def _prefill_hopper(
    Q, q_desc, k_desc, v_desc, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS,
    ITEMS, COUNTS, QUEUE, q_token, q_head, table_row, num_pages, out_token, out_head, lse_token,
    scale, softcap,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, OVERLAP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = (
        gl.allocate_shared_memory(dtype, [4, HALF, BLOCK_D], swizzled),  # Q of two items
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled),
        gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], swizzled),  # output staging
    )
    current = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    ping_pong_barrier = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AT_V + STAGES):
        mbarrier.init(full.index(i), count=1)
        # Both consumers release a stage of K or V.
        mbarrier.init(empty.index(i), count=1 if i < AT_K else 2)
    for i in gl.static_range(2):
        mbarrier.init(ping_pong_barrier.index(i), count=1)
    fence_async_shared()
    if DEPENDENT:
        if not OVERLAP:
            cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    tma_desc = (q_desc, k_desc, v_desc)
    results = (OUT, LSE, SINKS, PARTIAL_OUT, PARTIAL_LSE, out_token, out_head, lse_token)
    gl.warp_specialize(
        [
            (_consume, (
                Q, buffers, full, empty, ping_pong_barrier, current, results, q_token, q_head,
                scale, softcap,
                0, KV_HEADS, GROUP, PAGE, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, PING_PONG,
            )),
            (_consume, (
                Q, buffers, full, empty, ping_pong_barrier, current, results, q_token, q_head,
                scale, softcap,
                1, KV_HEADS, GROUP, PAGE, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, PING_PONG,
            )),
            (produce, (
                tma_desc, buffers, full, empty, current, TABLE, ITEMS, COUNTS, QUEUE, table_row,
                num_pages, KV_HEADS, GROUP, PAGE, BLOCK_N, STAGES, WINDOW, OVERLAP,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Tile size and compile options."""

    block_n: int
    stages: int
    ping_pong: bool  # consumers alternate between GEMMs and softmax


def hopper_config(head_dim: int) -> HopperConfig:
    """The configuration for a head_dim, by measurement on an H100."""
    return HopperConfig(block_n=128, stages=2 if head_dim > 64 else 4, ping_pong=True)


def prefill_hopper(
    inputs: KernelInputs,
    tiles: TilePlan,
    *,
    overlap: bool = False,
    config: HopperConfig | None = None,
) -> None:
    """Attention of the tile plan's rows as `prefill`; block_m 128, scale > 0, no float8 pages.

    overlap  run concurrently with the preceding kernel, which writes nothing that this one reads
             or writes, and waits for its own predecessors before it launches dependents
    """
    q, k, spec = inputs.q, inputs.k, tiles.spec
    heads, head_dim = q.shape[1:]
    pages, kv_heads, page, _ = k.shape
    group = heads // kv_heads
    assert (kv_heads, group) == (spec.kv_heads, spec.group), "the plan is for other heads"
    assert tiles.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    assert spec.block_m == 2 * HALF.value and spec.block_n % page == 0, "the plan is of other tiles"
    assert inputs.k_scale is None and inputs.v_scale is None and inputs.scale > 0
    config = config or hopper_config(head_dim)
    block_d = 64 if head_dim <= 64 else 128
    queries, query_desc = q, None
    if HALF.value % group == 0:
        queries, query_desc = None, tma_desc(q, [HALF.value // group, group, block_d])
    kv_box = [1, 1, page, block_d]
    _prefill_hopper[(spec.programs,)](
        queries, query_desc, tma_desc(k, kv_box), tma_desc(inputs.v, kv_box), inputs.page_table,
        tiles.partial_out, tiles.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        tiles.items, tiles.counts, tiles.queue, q.stride(0), q.stride(1),
        inputs.page_table.stride(0), pages, *inputs.out_strides(), inputs.scale, inputs.softcap,
        KV_HEADS=kv_heads, GROUP=group, PAGE=page, D=head_dim, BLOCK_N=config.block_n,
        STAGES=config.stages, WINDOW=spec.window, SOFTCAP=inputs.softcap > 0,
        PING_PONG=config.ping_pong, OVERLAP=overlap, num_warps=4, maxnreg=168,
        **dependent_launch(q.device),
    )  # fmt: skip
    merge_tiles(tiles, inputs)
