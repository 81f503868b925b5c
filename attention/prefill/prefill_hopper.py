"""Prefill attention for Hopper (sm_90), in Gluon, warp-specialized as FlashAttention-3.

prefill_hopper
  grid      fixed (plan.spec.programs), so that a graph can replay any step; a program takes the
            next (item, KV head) from the queue, longest items first, in sections of KV heads whose
            K and V fit in the L2 cache
  warps     a producer warp loads Q, K and V by TMA, one box per page (prefill_hopper_load.py); two
            consumer warpgroups attend with half of a tile's rows each (prefill_hopper_tile.py), in
            ping-pong: one runs GEMMs while the other exponentiates; the next tile's Q is prefetched
            up to head_dim 128; with float8 pages two more warps convert K and V
            (prefill_hopper_convert.py)
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D]; page_table [B, max_pages] int32;
            nothing of pages past a row's length, or before a tile's window
  writes    out [T, heads, D], lse [T, heads]; of tiles split along KV partial_out, partial_lse
            as prefill.py
  math      128 packed query rows of one KV head; online softmax in base 2, float32 sums; the
            p v of a block overlaps the exponentials of the next
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  checked   tests/attention/prefill/test_prefill_hopper.py against a float64 oracle

Tiles of Q, K and V in shared memory have at most 128 columns: with a larger head_dim they come in
parts, and so does the accumulator.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra import cuda

from attention.common.dependent_launch import dependent_launch
from attention.common.hopper import cta_barrier, tma_desc
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import LOG2E
from attention.kv_pool import FP8
from attention.planner.prefill_tiles import TilePlan
from attention.prefill.merge_tiles import merge_tiles
from attention.prefill.prefill_hopper_config import HopperConfig, hopper_config
from attention.prefill.prefill_hopper_convert import convert
from attention.prefill.prefill_hopper_load import produce
from attention.prefill.prefill_hopper_queries import fetch_queries, parts_of, queries_in_float16
from attention.prefill.prefill_hopper_stages import (
    AT_FP8,
    AT_K,
    AT_Q,
    AT_V,
    BARRIERS,
    FIELDS,
    HALF,
    init_barriers,
)
from attention.prefill.prefill_hopper_tile import add_last_values, attend, rescaled
from attention.prefill.prefill_hopper_write import write_split, write_whole

ENTRY_REGISTERS = 168  # per thread at the launch, before the warps exchange them: 12 warps


@gluon.jit
def _field(current, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(current.index(at).load(layout), 0)


@gluon.jit
def _next_item(current, full, taken, g: gl.constexpr, Q_STAGES: gl.constexpr):
    """Wait for the next item and its queries -> its fields; the first is -1 at the end."""
    slot = taken % Q_STAGES
    mbarrier.wait(full.index(AT_Q + slot * 2 + g), (taken // Q_STAGES) & 1)
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
    shared,
    g: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    D: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: half of the query rows of each tile."""
    (
        Q, buffers, full, empty, ping_pong_barrier, current, results, scales, q_token, q_head,
        scale, softcap,
    ) = shared  # fmt: skip
    queries, keys, values, stages = buffers
    K_SCALE, V_SCALE = scales
    ROW_SCALES: gl.constexpr = K_SCALE is not None
    BLOCK_N: gl.constexpr = keys.shape[1]
    Q_STAGES: gl.constexpr = queries.shape[0] // (2 * PARTS)
    block, step, taken = 0, 0, 0
    item = _next_item(current, full, taken, g, Q_STAGES)
    while item[0] >= 0:
        w, tile, q_start, q_len, partial = item[0], item[1], item[4], item[5], item[7]
        head, packed = w % KV_HEADS, tile * (2 * HALF) + g * HALF
        q = parts_of(queries, taken % Q_STAGES * 2 + g, PARTS)
        stage = q if len(stages) == 0 else (stages[0].index(g), stages[0].index(g))
        if Q is not None:
            fetch_queries(Q, q, packed, head, q_start, q_len, q_token, q_head, GROUP, D)
        factor = scale * LOG2E
        if K_SCALE is not None:
            narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
            q, row_factor = queries_in_float16(q, gl.SliceLayout(1, narrow))
            factor = gl.maximum(row_factor * (factor * gl.load(K_SCALE + head)), 1e-30)
        p, acc, m, total, block, step = attend(
            item, q, keys, values, full, empty, ping_pong_barrier, block, step, factor, softcap,
            g, PARTS, GROUP, PAGE, WINDOW, SOFTCAP, ROW_SCALES,
        )  # fmt: skip
        if len(stages) > 0:
            mbarrier.arrive(empty.index(AT_Q + taken % Q_STAGES * 2 + g), count=1)
        acc = add_last_values(p, acc, values, full, empty, block - 1, PARTS)
        if V_SCALE is not None:
            acc = rescaled(
                acc, gl.full([HALF], 1.0, gl.float32, m.type.layout) * gl.load(V_SCALE + head)
            )
        if partial != 0:
            write_split(acc, m, total, results, w, packed, q_len, g, GROUP, D)
        else:
            write_whole(acc, m, total, stage, results, packed, head, q_start, q_len, GROUP, D)
        if len(stages) == 0:
            fence_async_shared()
            cta_barrier()  # every warp has read what it wrote
            mbarrier.arrive(empty.index(AT_Q + taken % Q_STAGES * 2 + g), count=1)
        taken += 1
        item = _next_item(current, full, taken, g, Q_STAGES)


@gluon.jit(do_not_specialize=["table_row", "num_pages"])
def _prefill_hopper(
    Q, q_desc, k_desc, v_desc, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    ITEMS, COUNTS, QUEUE, q_token, q_head, table_row, num_pages, out_token, out_head, lse_token,
    scale, softcap,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, OUT_STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, KEYS_FIRST: gl.constexpr,
    CONVERT_ROWS: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    PARTS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    FP8: gl.constexpr = K_SCALE is not None
    TILES: gl.constexpr = STAGES * PARTS
    # Q has its own type in memory, even where it is converted.
    out_type: gl.constexpr = OUT.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if FP8 else out_type
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stages = ()
    if OUT_STAGES > 0:
        stages = (gl.allocate_shared_memory(out_type, [OUT_STAGES, HALF, BLOCK_D], swizzled),)
    buffers = (
        gl.allocate_shared_memory(out_type, [Q_STAGES * 2 * PARTS, HALF, BLOCK_D], swizzled),
        gl.allocate_shared_memory(dtype, [TILES, BLOCK_N, BLOCK_D], swizzled),
        gl.allocate_shared_memory(dtype, [TILES, BLOCK_N, BLOCK_D], swizzled),
        stages,
    )
    current = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    ping_pong_barrier = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    init_barriers(full, empty, AT_Q, 2 * Q_STAGES, 1)
    # Of K, V and float8 only the first STAGES are used.  Both consumers release a stage.
    init_barriers(full, empty, AT_K, TILES, 2)
    init_barriers(full, empty, AT_V, TILES, 2)
    if FP8:
        init_barriers(full, empty, AT_FP8, TILES, 1)
    for i in gl.static_range(2):
        mbarrier.init(ping_pong_barrier.index(i), count=1)
    float8 = ()
    if FP8:
        bytewise: gl.constexpr = gl.NVMMASharedLayout(BLOCK_D, 8, 2)
        float8 = (
            gl.allocate_shared_memory(k_desc.dtype, [TILES, BLOCK_N, BLOCK_D], bytewise),
            gl.allocate_shared_memory(gl.int32, [TILES, 1], flat),
        )
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        for i in gl.static_range(TILES):
            float8[1].index(i).store(gl.zeros([1], gl.int32, one))
    fence_async_shared()
    if DEPENDENT:
        if not OVERLAP:
            cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    tma_desc = (q_desc, k_desc, v_desc)
    results = (OUT, LSE, SINKS, PARTIAL_OUT, PARTIAL_LSE, out_token, out_head, lse_token)
    scales = (K_SCALE, V_SCALE)
    shared = (
        Q, buffers, full, empty, ping_pong_barrier, current, results, scales, q_token, q_head,
        scale, softcap,
    )  # fmt: skip
    source = (tma_desc, TABLE, ITEMS, COUNTS, QUEUE, table_row, num_pages)
    if not FP8:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, KV_HEADS, GROUP, PAGE, D, PARTS, WINDOW, SOFTCAP)),
                (_consume, (shared, 1, KV_HEADS, GROUP, PAGE, D, PARTS, WINDOW, SOFTCAP)),
                (produce, (
                    source, buffers, float8, full, empty, current, KV_HEADS, GROUP, PAGE, PARTS,
                    WINDOW, KEYS_FIRST, OVERLAP,
                )),
            ],
            [4, 1], [REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, KV_HEADS, GROUP, PAGE, D, PARTS, WINDOW, SOFTCAP)),
                (_consume, (shared, 1, KV_HEADS, GROUP, PAGE, D, PARTS, WINDOW, SOFTCAP)),
                (convert, (buffers, float8, full, empty, PARTS, CONVERT_ROWS)),
                (produce, (
                    source, buffers, float8, full, empty, current, KV_HEADS, GROUP, PAGE, PARTS,
                    WINDOW, KEYS_FIRST, OVERLAP,
                )),
            ],
            [4, 2, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip


def prefill_hopper(
    inputs: KernelInputs,
    tiles: TilePlan,
    *,
    overlap: bool = False,
    config: HopperConfig | None = None,
) -> None:
    """Attention of the tile plan's rows as `prefill`; block_m 128, scale > 0.

    overlap  run concurrently with the preceding kernel, which writes nothing that this one reads
             or writes, and waits for its own predecessors before it launches dependents
    """
    q, k, spec = inputs.q, inputs.k, tiles.spec
    heads, head_dim = q.shape[1:]
    pages, kv_heads, page, _ = k.shape
    group = heads // kv_heads
    assert (kv_heads, group) == (spec.kv_heads, spec.group), "the plan is for other heads"
    assert tiles.partial_out.shape[-1] == head_dim, "the plan is for another head_dim"
    config = config or hopper_config(head_dim, k.dtype)
    box = min(page, config.block_n)
    assert spec.block_m == 2 * HALF.value and spec.block_n % config.block_n == 0, "other tiles"
    assert not (config.keys_first and k.dtype == FP8), "converted keys precede their values"
    assert inputs.scale > 0
    block_d = 64 if head_dim <= 64 else 128
    queries, query_desc = q, None
    if HALF.value % group == 0:
        queries, query_desc = None, tma_desc(q, [HALF.value // group, group, block_d])
    kv_box = [1, 1, box, block_d]
    _prefill_hopper[(spec.programs,)](
        queries, query_desc, tma_desc(k, kv_box), tma_desc(inputs.v, kv_box), inputs.page_table,
        tiles.partial_out, tiles.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        inputs.k_scale, inputs.v_scale, tiles.items, tiles.counts, tiles.queue,
        q.stride(0), q.stride(1), inputs.page_table.stride(0), pages, *inputs.out_strides(),
        inputs.scale, inputs.softcap,
        KV_HEADS=kv_heads, GROUP=group, PAGE=page, D=head_dim, BLOCK_N=config.block_n,
        STAGES=config.stages, Q_STAGES=config.q_stages, OUT_STAGES=config.out_stages,
        WINDOW=spec.window, SOFTCAP=inputs.softcap > 0, KEYS_FIRST=config.keys_first,
        CONVERT_ROWS=config.convert_rows, REGISTERS=config.registers,
        LOAD_REGISTERS=config.load_registers, OVERLAP=overlap, num_warps=4, maxnreg=ENTRY_REGISTERS,
        **dependent_launch(q.device),
    )  # fmt: skip
    merge_tiles(tiles, inputs)
