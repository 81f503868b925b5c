"""delta_net_prompts: the four launches for rows of more tokens than the decode kernel takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from model_zoo.layers.delta_net.chunk_local import _chunk_local
from model_zoo.layers.delta_net.chunk_scan import _chunk_scan
from model_zoo.layers.delta_net.gated_norm import _gated_norm
from model_zoo.layers.delta_net.inputs import (
    CHUNK,
    ChunkPlan,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.prompt_inputs import _prompt_inputs

MAX_PROMPTS = 8  # rows that programs of their own scan at a time
SPARE_CHUNKS = 16  # programs beyond those that full chunks need


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tile sizes and compile options.

    channels that a program of prompt_inputs has, at most
    part     columns of u and w that chunk_local computes at once
    block_v  columns of a state that a program of chunk_scan has
    """

    channels: int = 512
    input_warps: int = 2
    part: int = 64
    local_warps: int = 4
    local_registers: int = 168  # three programs a multiprocessor
    block_v: int = 64
    scan_warps: int = 4
    scan_stages: int = 2
    norm_warps: int = 4


THREE_STAGES_BYTES = 140 << 10  # of shared memory, without Hopper's instructions
# Where chunk_local multiplies by less than 64 columns at once, ptxas 12.8 must not be given the
# inverse in registers, which it is by 4 warps: it would lose the address of the other matrix.
SMALL_HEAD, SMALL_HEAD_WARPS = 32, 8
# float32 has twice the bytes, and no tensor cores.
FLOAT32_TILES = PromptTiles(part=32, local_warps=8, local_registers=255, block_v=32, scan_stages=1)


@cache
def prompt_tiles(dtype: torch.dtype, device: torch.device, head_dim: int) -> PromptTiles:
    """The tiles of a device: GPUs with less shared memory copy one chunk at a time.

    head_dim  the smaller one of keys and values
    """
    if dtype == torch.float32:
        return FLOAT32_TILES
    tiles = PromptTiles()
    if head_dim <= SMALL_HEAD:
        tiles = replace(tiles, local_warps=SMALL_HEAD_WARPS)
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared < THREE_STAGES_BYTES:
            return replace(tiles, scan_stages=2)
    return tiles


def _divisor(number: int, most: int) -> int:
    """The largest power of two that divides it, `most` at most: both are multiples of a head."""
    return min(number & -number, most)


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
    tokens, (_, value_heads, key_dim, value_dim) = len(qkv), state.state.shape
    tiles = tiles or prompt_tiles(qkv.dtype, qkv.device, min(key_dim, value_dim))
    key_heads, size = state.key_heads, weights.conv.shape[1]
    assert out.is_contiguous()
    if not len(plan.rows):
        return
    dims = {"HK": key_heads, "HV": value_heads, "DK": key_dim, "DV": value_dim}
    options = {"CHUNK": CHUNK, **dependent_launch(qkv.device)}
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    qk = qkv.new_empty(2, tokens, key_heads, key_dim)
    v, u = (qkv.new_empty(tokens, value_heads, value_dim) for _ in range(2))
    w = qkv.new_empty(tokens, value_heads, key_dim)
    p = qkv.new_empty(tokens, value_heads, CHUNK)
    decay, left = torch.empty(2, tokens, value_heads, dtype=torch.float32, device=qkv.device)
    chunks = min(len(plan.chunks), tokens // CHUNK + SPARE_CHUNKS)
    keys = _divisor(key_heads * key_dim, tiles.channels)
    values = _divisor(value_heads * value_dim, tiles.channels)
    blocks = 2 * key_heads * key_dim // keys + value_heads * value_dim // values
    _prompt_inputs[(chunks, blocks)](
        qkv, b, weights.conv, state.conv, rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        plan.chunks, plan.counts, qk, v, tokens, qkv.stride(0), b.stride(0),
        *weights.conv.stride(), state.conv.stride(0), KEYS=keys, VALUES=values, K=size,
        num_warps=tiles.input_warps, **dims, **dependent_launch(qkv.device),
    )  # fmt: skip
    _chunk_local[(chunks, value_heads)](
        b, a, weights.a_log, weights.dt_bias, plan.chunks, plan.counts, qk[0], qk[1], v, u, w, p,
        decay, left, b.stride(0), a.stride(0), PART=min(tiles.part, key_dim, value_dim),
        PRECISION=precision, num_warps=tiles.local_warps, num_stages=1,
        maxnreg=tiles.local_registers, **dims, **options,
    )  # fmt: skip
    snapshots, block_v = rows.snapshots, min(tiles.block_v, value_dim)
    _chunk_scan[(min(len(plan.rows), MAX_PROMPTS), value_heads * (value_dim // block_v))](
        qk[0], qk[1], u, w, p, decay, left, qkv, state.conv, state.state, rows.cu_seqlens,
        rows.cache_seqlens, rows.slots, None if snapshots is None else snapshots.first,
        None if snapshots is None else snapshots.slots, plan.rows, plan.counts, out,
        qkv.stride(0), state.conv.stride(0), state.state.stride(0), BLOCK_V=block_v, K=size,
        COLUMNS=triton.next_power_of_2(size - 1), PRECISION=precision, num_warps=tiles.scan_warps,
        num_stages=tiles.scan_stages, **dims, **options,
    )  # fmt: skip
    _gated_norm[(chunks, value_heads)](
        out, z, weights.norm, plan.chunks, plan.counts, weights.norm_eps, z.stride(0),
        HV=value_heads, DV=value_dim, num_warps=tiles.norm_warps, **options,
    )  # fmt: skip
