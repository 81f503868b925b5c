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
)

DIM = 128  # of keys and of values
HALF = 64  # columns of a state that a program has
LOCAL_REGISTERS = 168  # of a thread: three programs a multiprocessor
SCAN_STAGES = 3
STORE_REGISTERS, LOAD_REGISTERS = 96, 40  # of a thread; one that multiplies has the rest, 248


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
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    out: Tensor,
    programs: int,
) -> None:
    """chunk_scan; programs: rows at once."""
    from model_zoo.layers.delta_net.hopper.scan import _scan

    q, k, v = chunked.q, chunked.k, chunked.v
    solve, p, gates = chunked.solve, chunked.p, chunked.gates
    tokens, heads, dim = v.shape
    snapshots = rows.snapshots
    tile = [CHUNK, dim]
    _scan[(programs * heads * 2,)](
        tma_desc(q.view(tokens, -1), tile), tma_desc(k.view(tokens, -1), tile),
        tma_desc(v.view(tokens, -1), [CHUNK, HALF]), tma_desc(solve.view(tokens, -1), [CHUNK] * 2),
        tma_desc(p.view(tokens, -1), [CHUNK] * 2), tma_desc(gates.view(-1, CHUNK), [2, CHUNK], 0),
        state.state, rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        rows.slots if snapshots is None else snapshots.first,
        rows.slots if snapshots is None else snapshots.slots, plan.rows, plan.first_chunks,
        plan.counts, out, state.state.stride(0), HK=q.shape[1], HV=heads, STAGES=SCAN_STAGES,
        SNAPSHOT=snapshots is not None, STORE_REGISTERS=STORE_REGISTERS,
        LOAD_REGISTERS=LOAD_REGISTERS, num_warps=4, maxnreg=128, **dependent_launch(out.device),
    )  # fmt: skip
