"""Attention of packed sequences without a mask for Hopper (sm_90), in Gluon.

varlen_hopper
  grid      a program for each SM; program p takes the tiles p, p + programs, ...: those of a head
            follow each other, so that programs share its K and V in the L2 cache
  warps     a warp loads Q, K and V by TMA; 2 or 3 consumer warpgroups attend with 64 of a tile's
            rows each (varlen_hopper_tile.py) and take turns: one starts its products while the
            others exponentiate; the next tile's Q is prefetched
  reads     qkv [T, 3, heads, D] bf16 or fp16, rows at any stride of 16 bytes; cu_seqlens [B + 1]
            int32.  A tile's last rows may be of the next sequence: their scores are masked, their
            values zeroed
  writes    out [T, heads, D]
  math      online softmax in base 2, float32 sums; the p v of a block overlaps the exponentials
            of the next
  bound     compute: 4 * D * (query, key) pairs floating-point operations a head
  limits    D of 64 to 80 in multiples of 8
  checked   tests/attention/encoder/test_varlen_hopper.py against a float64 oracle
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attention.common.hopper import tma_desc
from attention.common.softmax import LOG2E
from attention.encoder.seqlens import Seqlens
from attention.encoder.varlen_hopper_config import (
    CONSUMER_ROWS,
    TWO_CONSUMERS,
    VarlenHopperConfig,
)
from attention.encoder.varlen_hopper_tile import add_last_values, attend, write
from attention.prefill.prefill_hopper_stages import (
    AT_K,
    AT_Q,
    AT_V,
    BARRIERS,
    HALF,
    barrier_of,
    init_barriers,
)


@gluon.jit
def _tile_of(w, work, HEADS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Tile w -> (head, its first row, first and last + 1 row of its sequence).

    The first row may be past the end: sequences have as many tiles as the longest one.
    """
    CU_SEQLENS, tiles, _ = work
    sequence = w // (tiles * HEADS)
    within = w - sequence * (tiles * HEADS)
    begin, end = gl.load(CU_SEQLENS + sequence), gl.load(CU_SEQLENS + sequence + 1)
    return within // tiles, begin + within % tiles * BLOCK_M, begin, end


@gluon.jit
def _copy(desc, tile, ready, row, head, FIRST: gl.constexpr):
    """Start the copies of a tile's rows, 64 at a time, from column FIRST on."""
    boxes = tile.reshape([tile.shape[0], 1, tile.shape[1]])
    for j in gl.static_range(tile.shape[0] // HALF):
        box = boxes.slice(j * HALF, HALF, 0)
        tma.async_copy_global_to_shared(desc, [row + j * HALF, head, FIRST], ready, box)


@gluon.jit
def _load_block(
    desc, buffers, full, empty, block, row, head, AT: gl.constexpr, ROW_BYTES: gl.constexpr
):
    """Start the copies of a block's rows of all columns into the next stage of K or V."""
    STAGES: gl.constexpr = buffers[0].shape[0]
    BLOCK_N: gl.constexpr = buffers[0].shape[1]
    barrier, phase = barrier_of(block, STAGES)
    ready = full.index(AT + barrier)
    mbarrier.wait(empty.index(AT + barrier), phase ^ 1)
    mbarrier.expect(ready, BLOCK_N * ROW_BYTES)
    for part in gl.static_range(len(desc)):
        tile = buffers[part].index(barrier)
        _copy(desc[part], tile, ready, row, head, part * buffers[0].shape[2])


@gluon.jit
def _load_queries(
    desc, queries, full, empty, taken, row, head, CONSUMERS: gl.constexpr, ROW_BYTES: gl.constexpr
):
    """Start the copies of a tile's queries into the next stage."""
    Q_STAGES: gl.constexpr = queries[0].shape[0] // CONSUMERS
    slot, phase = barrier_of(taken, Q_STAGES)
    ready = full.index(AT_Q + slot)
    mbarrier.wait(empty.index(AT_Q + slot), phase ^ 1)
    mbarrier.expect(ready, CONSUMERS * HALF * ROW_BYTES)
    for part in gl.static_range(len(desc)):
        for g in gl.static_range(CONSUMERS):
            tile = queries[part].index(slot * CONSUMERS + g)
            _copy(desc[part], tile, ready, row + g * HALF, head, part * queries[0].shape[2])


@gluon.jit
def _produce(source, HEADS: gl.constexpr, CONSUMERS: gl.constexpr, ROW_BYTES: gl.constexpr):
    """Load the Q, K and V of this program's tiles; K and V in descending order.

    Stages are free again in the order of the products: keys of a block, values of the block before.
    """
    desc, work, buffers, full, empty = source
    queries, keys, values = buffers
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    block, taken = 0, 0
    w = gl.program_id(0)
    while w < work[2]:
        head, row, begin, end = _tile_of(w, work, HEADS, CONSUMERS * HALF)
        if row < end:
            _load_queries(desc, queries, full, empty, taken, row, head, CONSUMERS, ROW_BYTES)
            taken += 1
            k_head, v_head = HEADS + head, 2 * HEADS + head
            start = begin + (gl.cdiv(end - begin, BLOCK_N) - 1) * BLOCK_N
            _load_block(desc, keys, full, empty, block, start, k_head, AT_K, ROW_BYTES)
            while start > begin:
                before = start - BLOCK_N
                _load_block(desc, keys, full, empty, block + 1, before, k_head, AT_K, ROW_BYTES)
                _load_block(desc, values, full, empty, block, start, v_head, AT_V, ROW_BYTES)
                start = before
                block += 1
            _load_block(desc, values, full, empty, block, start, v_head, AT_V, ROW_BYTES)
            block += 1
        w = w + gl.num_programs(0)


@gluon.jit
def _consume(
    shared, g: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr
):
    """A consumer warpgroup: 64 query rows of each tile."""
    work, buffers, full, empty, ping_pong_barrier, OUT, factor = shared
    queries, keys, values = buffers
    Q_STAGES: gl.constexpr = queries[0].shape[0] // CONSUMERS
    block, step, taken = 0, 0, 0
    w = gl.program_id(0)
    while w < work[2]:
        head, row, begin, end = _tile_of(w, work, HEADS, CONSUMERS * HALF)
        if row < end:
            slot, phase = barrier_of(taken, Q_STAGES)
            mbarrier.wait(full.index(AT_Q + slot), phase)
            q = ()
            for part in gl.static_range(len(queries)):
                q = q + (queries[part].index(slot * CONSUMERS + g),)  # noqa: RUF005
            p, acc, total, block, step = attend(
                q, keys, values, full, empty, ping_pong_barrier, block, step, begin, end, factor,
                g, CONSUMERS,
            )  # fmt: skip
            mbarrier.arrive(empty.index(AT_Q + slot), count=1)
            acc = add_last_values(p, acc, values, full, empty, block - 1)
            write(acc, total, OUT, row + g * HALF, end, head, HEADS, D)
            taken += 1
        w = w + gl.num_programs(0)


@gluon.jit
def _allocate(dtype: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """N tiles of each part: of 64 columns, and of 16."""
    main: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = (gl.allocate_shared_memory(dtype, [N, ROWS, 64], main),)
    if PARTS > 1:
        rest: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
        tiles = tiles + (gl.allocate_shared_memory(dtype, [N, ROWS, 16], rest),)  # noqa: RUF005
    return tiles


@gluon.jit(do_not_specialize=["tiles", "total_tiles"])
def _varlen_hopper(
    main_desc, rest_desc, OUT, CU_SEQLENS, tiles, total_tiles, factor,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = OUT.dtype.element_ty
    desc = (main_desc,)
    if rest_desc is not None:
        desc = (main_desc, rest_desc)
    PARTS: gl.constexpr = 1 if rest_desc is None else 2
    ROW_BYTES: gl.constexpr = 2 * 64 if rest_desc is None else 2 * (64 + 16)
    buffers = (
        _allocate(dtype, Q_STAGES * CONSUMERS, HALF, PARTS),
        _allocate(dtype, STAGES, BLOCK_N, PARTS),
        _allocate(dtype, STAGES, BLOCK_N, PARTS),
    )
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    ping_pong_barrier = gl.allocate_shared_memory(
        gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout()
    )
    init_barriers(full, empty, AT_Q, Q_STAGES, CONSUMERS)
    init_barriers(full, empty, AT_K, STAGES, CONSUMERS)
    init_barriers(full, empty, AT_V, STAGES, CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(ping_pong_barrier.index(i), count=1)
    fence_async_shared()
    work = (CU_SEQLENS, tiles, total_tiles)
    shared = (work, buffers, full, empty, ping_pong_barrier, OUT, factor)
    source = (desc, work, buffers, full, empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, HEADS, D, CONSUMERS)),
                (_consume, (shared, 1, HEADS, D, CONSUMERS)),
                (_produce, (source, HEADS, CONSUMERS, ROW_BYTES)),
            ],
            [4, 1], [REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, HEADS, D, CONSUMERS)),
                (_consume, (shared, 1, HEADS, D, CONSUMERS)),
                (_consume, (shared, 2, HEADS, D, CONSUMERS)),
                (_produce, (source, HEADS, CONSUMERS, ROW_BYTES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def varlen_hopper(
    qkv: Tensor, seqlens: Seqlens, *, config: VarlenHopperConfig | None = None
) -> Tensor:
    """See above: qkv [T, 3, heads, D] -> out [T, heads, D]."""
    count, three, heads, head_dim = qkv.shape
    assert three == 3 and 64 <= head_dim <= 80 and head_dim % 8 == 0
    assert qkv.stride()[1:] == (heads * head_dim, head_dim, 1)
    config = config or TWO_CONSUMERS
    out = torch.empty(count, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    tiles = -(-seqlens.longest // config.rows)
    total_tiles = tiles * heads * len(seqlens.lens)
    rows, half = qkv.flatten(1, 2), CONSUMER_ROWS  # [T, 3 * heads, D]
    _varlen_hopper[(min(_num_sms(qkv.device), total_tiles),)](
        tma_desc(rows, [half, 1, 64]), tma_desc(rows, [half, 1, 16]) if head_dim > 64 else None,
        out, seqlens.cu_seqlens, tiles, total_tiles, head_dim**-0.5 * LOG2E.value,
        HEADS=heads, D=head_dim, BLOCK_N=config.block_n, STAGES=config.stages,
        Q_STAGES=config.q_stages, CONSUMERS=config.consumers, REGISTERS=config.registers,
        LOAD_REGISTERS=config.load_registers, num_warps=4, maxnreg=config.entry_registers,
    )  # fmt: skip
    return out
