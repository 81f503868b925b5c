"""The launches of the Hopper kernels."""

from __future__ import annotations

from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from attention.common.hopper import tma_desc
from model_zoo.layers.delta_net.inputs import (
    CHUNK,
    Chunked,
    ChunkPlan,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)

DIM = 128  # of keys and of values
HALF = 64  # columns of a state that a warpgroup has
LOCAL_REGISTERS = 168  # of a thread: three programs a multiprocessor
SCAN_STAGES = 3
# Of a thread that multiplies, that has the gated norm, that loads: 512 with a second one that
# multiplies.
SCAN_REGISTERS = 200, 80, 32
HALF_REGISTERS = 248, 96, 40  # of one that multiplies, that stores, that loads: 384


def local_hopper(
    qkv: Tensor,
    chunked: Chunked,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    chunks: int,
) -> None:
    """chunk_local; chunks: that programs of their own have."""
    from model_zoo.layers.delta_net.hopper.local import _local

    q, k = chunked.q, chunked.k
    tokens, key_heads, dim = q.shape
    snapshots = rows.snapshots
    _local[(chunks * key_heads,)](
        tma_desc(q.view(tokens, -1), [CHUNK, dim]), tma_desc(k.view(tokens, -1), [CHUNK, dim]), qkv,
        state.conv, rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        rows.slots if snapshots is None else snapshots.first,
        rows.slots if snapshots is None else snapshots.slots, plan.chunks, plan.counts,
        chunked.gates, chunked.solve, chunked.p, qkv.stride(0), state.conv.stride(0), HK=key_heads,
        HV=state.state.shape[1], SNAPSHOT=snapshots is not None, num_warps=4,
        maxnreg=LOCAL_REGISTERS, **dependent_launch(qkv.device),
    )  # fmt: skip


def scan_hopper(
    chunked: Chunked,
    z: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    out: Tensor,
    programs: int,
    halves: int,
) -> None:
    """chunk_scan, with both halves of heads in a program also gated_norm; programs: rows at once"""
    from model_zoo.layers.delta_net.hopper.scan import _scan

    q, k, v = chunked.q, chunked.k, chunked.v
    solve, p, gates = chunked.solve, chunked.p, chunked.gates
    tokens, heads, dim = v.shape
    snapshots = rows.snapshots
    tile = [CHUNK, dim]
    registers = SCAN_REGISTERS if halves == 2 else HALF_REGISTERS
    _scan[(programs * heads * 2 // halves,)](
        tma_desc(q.view(tokens, -1), tile), tma_desc(k.view(tokens, -1), tile),
        tma_desc(v.view(tokens, -1), [CHUNK, HALF]), tma_desc(solve.view(tokens, -1), [CHUNK] * 2),
        tma_desc(p.view(tokens, -1), [CHUNK] * 2), tma_desc(gates.view(-1, CHUNK), [2, CHUNK], 0),
        tma_desc(z, [CHUNK, HALF]), weights.norm, state.state, rows.cu_seqlens, rows.cache_seqlens,
        rows.slots, rows.slots if snapshots is None else snapshots.first,
        rows.slots if snapshots is None else snapshots.slots, plan.rows, plan.first_chunks,
        plan.counts, out, weights.norm_eps, state.state.stride(0), HK=q.shape[1], HV=heads,
        STAGES=SCAN_STAGES, SNAPSHOT=snapshots is not None, HALVES=halves,
        REGISTERS=registers[0], STORE_REGISTERS=registers[1], LOAD_REGISTERS=registers[2],
        num_warps=4,
        maxnreg=128, **dependent_launch(out.device),
    )  # fmt: skip
