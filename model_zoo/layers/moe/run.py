"""run_experts: the experts' kernels for any number of tokens: at most four launches."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from model_zoo.layers.gemm.implementations import TILES, workspace
from model_zoo.layers.moe.align import align
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.moe.expert_tile import weight_arguments
from model_zoo.layers.moe.few_tokens import _few_down, _few_gate_up
from model_zoo.layers.moe.grouped import GROUP_M, _grouped_down, _grouped_gate_up
from model_zoo.layers.moe.hopper.run import run_hopper
from model_zoo.layers.moe.hopper.tiles import HopperTiles
from model_zoo.layers.moe.sum_pairs import sum_pairs
from model_zoo.layers.moe.tiles import FEW, FEW_COLUMNS, ExpertTiles, ProductTile, Tiles
from model_zoo.moe_config import Activation


class StackedExperts(Protocol):
    """What the kernels need of Experts."""

    num_experts: int
    is_partial: bool
    top_k: int
    hidden: int
    inner: int
    activation: Activation
    gate_up: ExpertStack
    down: ExpertStack
    is_batch_invariant: bool

    def tiles_of(self, tokens: int) -> Tiles: ...


def run_experts(
    experts: StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As Experts.forward.  tiles: instead of those of Experts.tiles_of.

    Which kernels run, and their grids, depend on the number of tokens alone, and the host reads
    nothing: a CUDA graph can capture it.
    """
    tokens = len(x)
    if tokens == 0:
        return torch.empty_like(x)
    assert ids.shape == weights.shape == (tokens, experts.top_k) and ids.dtype == torch.int32
    assert ids.is_contiguous() and weights.is_contiguous() and x.stride(1) == 1
    assert x.shape == (tokens, experts.hidden) and weights.dtype == torch.float32
    assert shared is None or (shared.shape == x.shape and shared.is_contiguous())
    assert shared_gate is None or (shared is not None and shared_gate.shape == (tokens,))
    tiles = tiles or experts.tiles_of(tokens)
    if isinstance(tiles, HopperTiles):
        return run_hopper(experts, x, ids, weights, shared, shared_gate, tiles)
    few = tokens <= FEW and not experts.is_batch_invariant
    run = _few if few else _grouped
    return run(experts, x, ids, weights, shared, shared_gate, tiles)


def _few(
    experts: StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    tiles: ExpertTiles,
) -> Tensor:
    tokens, pairs, hidden, inner = len(x), ids.numel(), experts.hidden, experts.inner
    gate_up, down = tiles.gate_up, tiles.down
    tiles_n = triton.cdiv(hidden, down.outputs)
    assert tiles_n <= TILES
    columns = {
        "TOP_K": experts.top_k,
        "SLOTS": triton.next_power_of_2(experts.top_k),
        "COLUMNS": FEW_COLUMNS,
        "OWN": experts.num_experts if experts.is_partial else 0,
    }
    first, second = weight_arguments(experts.gate_up), weight_arguments(experts.down)
    between = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    _few_gate_up[(pairs, triton.cdiv(inner, gate_up.outputs))](
        x, ids, between, *first.tensors, tokens, inner, hidden, x.stride(0), first.width,
        *first.strides, **columns, **first.of_tile(gate_up.columns, hidden),
        ACTIVATION=experts.activation, **_options(gate_up, x),
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    _few_down[(pairs, tiles_n)](
        between, ids, weights, parts, workspace(x.device)[1], shared, shared_gate, out,
        *second.tensors, tokens, hidden, inner, _stride(shared_gate), second.width,
        *second.strides, **columns, **second.of_tile(down.columns, inner),
        PREFETCH=second.row_bytes % 16 == 0, **_options(down, x),
    )  # fmt: skip
    return out


def _grouped(
    experts: StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    tiles: ExpertTiles,
) -> Tensor:
    tokens, pairs, hidden, inner = len(x), ids.numel(), experts.hidden, experts.inner
    gate_up, down = tiles.gate_up, tiles.down
    tiles_n, partial = triton.cdiv(hidden, down.outputs), experts.is_partial
    found = align(ids, experts.num_experts, tiles.rows, 0 if partial else tiles_n * tokens)
    groups = {"TOP_K": experts.top_k, "BLOCK_M": tiles.rows, "GROUP_M": GROUP_M}
    first, second = weight_arguments(experts.gate_up), weight_arguments(experts.down)
    aligned = found.pairs, found.counts, found.tiles, found.num_tiles
    between = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    _grouped_gate_up[(found.most_tiles * triton.cdiv(inner, gate_up.outputs),)](
        x, *aligned, between, *first.tensors, tokens, inner, hidden, x.stride(0), first.width,
        *first.strides, **groups, **first.of_tile(gate_up.columns, hidden),
        ACTIVATION=experts.activation, **_options(gate_up, x),
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    _grouped_down[(found.most_tiles * tiles_n,)](
        between, weights, *aligned, parts, found.arrivals, shared, shared_gate, out,
        *second.tensors, tokens, hidden, inner, _stride(shared_gate), second.width,
        *second.strides, SUMS=not partial, **groups, **second.of_tile(down.columns, inner),
        **_options(down, x),
    )  # fmt: skip
    if partial:  # no program knows how many of a token's experts are here
        sum_pairs(parts, out, ids, experts.num_experts, shared, shared_gate)
    return out


def _options(tile: ProductTile, x: Tensor) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "BLOCK_N": tile.outputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **dependent_launch(x.device),
    }


def _stride(gate: Tensor | None) -> int:
    return 0 if gate is None else gate.stride(0)
