"""delta_net_prompts: the four launches for rows of more tokens than the decode kernel takes."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from model_zoo.layers.delta_net.chunk_local import _chunk_local
from model_zoo.layers.delta_net.chunk_scan import _chunk_scan
from model_zoo.layers.delta_net.gated_norm import _gated_norm
from model_zoo.layers.delta_net.hopper.serves import serves_prompts
from model_zoo.layers.delta_net.inputs import (
    CHUNK,
    Chunked,
    ChunkPlan,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.prompt_inputs import _prompt_inputs
from model_zoo.layers.delta_net.tiles import PromptTiles, power_of_two_within

MAX_PROMPTS = 8  # rows that programs of their own scan at a time
GATE_HEADS = 16  # of which a program of prompt_inputs has the gates
SPARE_CHUNKS = 16  # programs beyond those that full chunks need

# float32 has twice the bytes, and no tensor cores.
FLOAT32_TILES = PromptTiles(
    local_warps=8, local_registers=255, block_v=32, scan_warps=8, scan_stages=1
)


def prompt_tiles(dtype: torch.dtype) -> PromptTiles:
    """The tiles of a type without a trial."""
    return FLOAT32_TILES if dtype == torch.float32 else PromptTiles()


def delta_net_prompts(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    out: Tensor,
    tiles: PromptTiles | None = None,
) -> None:
    """gated_delta_net of the rows in the plan, into out [T, Hv * Dv]; other tokens are left alone.

    Grids depend on numbers of tokens and rows alone, and the host reads nothing: a CUDA graph can
    capture it.  A row's result depends on its own tokens and their positions alone.
    """
    tiles = tiles or prompt_tiles(qkv.dtype)
    assert out.is_contiguous()
    if not len(plan.rows):
        return
    serves = serves_prompts(qkv, state)
    chunks = min(len(plan.chunks), len(qkv) // CHUNK + SPARE_CHUNKS)
    chunked = _launch_inputs(qkv, b, a, weights, state, rows, plan, chunks, tiles)
    if tiles.local_hopper and serves:
        from model_zoo.layers.delta_net.hopper.run import local_hopper

        local_hopper(qkv, chunked, state, rows, plan, chunks)
    else:
        _launch_local(qkv, weights, state, rows, plan, chunked, chunks, tiles)
    programs = min(len(plan.rows), MAX_PROMPTS)
    if tiles.scan_hopper and serves:
        from model_zoo.layers.delta_net.hopper.run import scan_hopper

        scan_hopper(chunked, state, rows, plan, out, programs)
    else:
        _launch_scan(chunked, state, rows, plan, out, programs, tiles)
    heads, dim = chunked.v.shape[1:]
    _gated_norm[(chunks, heads)](
        out, z, weights.norm, plan.chunks, plan.counts, weights.norm_eps, z.stride(0), HV=heads,
        DV=dim, CHUNK=CHUNK, num_warps=tiles.norm_warps, **dependent_launch(qkv.device),
    )  # fmt: skip


def _dims(state: DeltaNetState) -> dict[str, int]:
    _, value_heads, value_dim, key_dim = state.state.shape
    return {"HK": state.key_heads, "HV": value_heads, "DK": key_dim, "DV": value_dim}


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _snapshots(rows: DeltaNetRows) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rows.snapshots is None else (rows.snapshots.first, rows.snapshots.slots)


def _launch_inputs(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    chunks: int,
    tiles: PromptTiles,
) -> Chunked:
    """prompt_inputs; solve and p are not written yet."""
    tokens, dims = len(qkv), _dims(state)
    key_heads, value_heads, key_dim, value_dim = dims.values()
    qk = qkv.new_empty(2, tokens, key_heads, key_dim)
    v = qkv.new_empty(tokens, value_heads, value_dim)
    solve_p = qkv.new_empty(2, tokens, value_heads, CHUNK)
    gates = torch.empty(
        len(plan.chunks), value_heads, 4, CHUNK, dtype=torch.float32, device=qkv.device
    )
    keys = power_of_two_within(key_heads * key_dim, tiles.channels)
    values = power_of_two_within(value_heads * value_dim, tiles.channels)
    blocks = -(-value_heads // GATE_HEADS)
    blocks += 2 * key_heads * key_dim // keys + value_heads * value_dim // values
    _prompt_inputs[(chunks, blocks)](
        qkv, b, a, weights.conv, weights.a_log, weights.dt_bias, state.conv, rows.cu_seqlens,
        rows.cache_seqlens, rows.slots, plan.chunks, plan.counts, qk, v, gates, tokens,
        qkv.stride(0), b.stride(0), a.stride(0), *weights.conv.stride(), state.conv.stride(0),
        HEADS=GATE_HEADS, KEYS=keys, VALUES=values, K=weights.conv.shape[1], CHUNK=CHUNK,
        num_warps=tiles.input_warps, **dims, **dependent_launch(qkv.device),
    )  # fmt: skip
    return Chunked(qk[0], qk[1], v, solve_p[0], solve_p[1], gates)


def _launch_local(
    qkv: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    chunked: Chunked,
    chunks: int,
    tiles: PromptTiles,
) -> None:
    _chunk_local[(chunks, chunked.v.shape[1])](
        qkv, state.conv, rows.cu_seqlens, rows.cache_seqlens, rows.slots, *_snapshots(rows),
        plan.chunks, plan.counts, chunked.q, chunked.k, chunked.gates, chunked.solve, chunked.p,
        qkv.stride(0), state.conv.stride(0), K=weights.conv.shape[1], CHUNK=CHUNK,
        FACTOR=tl.float32 if qkv.dtype == torch.float32 else tl.float16,
        PRECISION=_precision(qkv.dtype), num_warps=tiles.local_warps, num_stages=1,
        maxnreg=tiles.local_registers, **_dims(state), **dependent_launch(qkv.device),
    )  # fmt: skip


def _launch_scan(
    chunked: Chunked,
    state: DeltaNetState,
    rows: DeltaNetRows,
    plan: ChunkPlan,
    out: Tensor,
    programs: int,
    tiles: PromptTiles,
) -> None:
    _, heads, dim = chunked.v.shape
    block_v = min(tiles.block_v, dim)
    _chunk_scan[(programs, heads * (dim // block_v))](
        chunked.q, chunked.k, chunked.v, chunked.solve, chunked.p, chunked.gates, state.state,
        rows.cu_seqlens, rows.cache_seqlens, rows.slots, *_snapshots(rows), plan.rows,
        plan.first_chunks, plan.counts, out, state.state.stride(0), BLOCK_V=block_v, CHUNK=CHUNK,
        PRECISION=_precision(out.dtype), num_warps=tiles.scan_warps, num_stages=tiles.scan_stages,
        **_dims(state), **dependent_launch(out.device),
    )  # fmt: skip
