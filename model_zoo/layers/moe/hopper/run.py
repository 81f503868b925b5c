"""run_hopper: the Hopper kernels of experts, in two launches for one token, in four for several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from attention.common.hopper import tma_desc
from model_zoo.layers.gemm.implementations import TILES, workspace
from model_zoo.layers.moe.align import AlignedPairs, align
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.moe.hopper.tiles import HEIGHT, HopperTiles
from model_zoo.layers.moe.sum_pairs import sum_pairs
from model_zoo.layers.quantized_gemm.hopper.arguments import format_arguments, four_together
from model_zoo.quantization.weight_scheme import BLOCK

FEW = 8  # tokens up to which outputs of pairs are float32 until they are added

# Of unquantized weights.
PLAIN: dict[str, Any] = {
    "PTX": "", "CONSTRAINTS": "", "DTYPE": "", "BITS": 16, "PER_BLOCK": 0, "FACTORS": 0,
    "SYNC": False, "ROW_GROUP": 1, "FACTOR": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """What the kernel is given of an ExpertStack."""

    words: Tensor  # [E * N, K], or words of packed weights
    tensors: tuple[Tensor | None, ...]  # scales, zeros, row scales, bias
    columns: int  # K, or more in a packed weight
    swizzle: int
    constants: dict[str, Any]


def weight_of(stack: ExpertStack, sync: bool) -> Weight:
    if stack.packed is None:
        words = stack.weight.flatten(0, 1)
        return Weight(words, (None, None, None, stack.bias), stack.inputs, 128, PLAIN)
    whole, one = stack.packed.stack(), stack.packed.of(0)
    found = format_arguments(one, stack.dtype, one.shape[1], sync)
    scales = four_together(whole.scales, found.per_block)
    zeros = four_together(whole.zeros, found.per_block)
    row_scales = whole.scales if found.by_row else whole.row_scales
    return Weight(
        whole.words.flatten(0, 1), (scales, zeros, row_scales, stack.bias), one.shape[1],
        found.swizzle, found.constants,
    )  # fmt: skip


def run_hopper(
    experts: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    tiles: HopperTiles,
) -> Tensor:
    """As run_experts; experts: StackedExperts."""
    tokens, pairs, hidden, inner = len(x), ids.numel(), experts.hidden, experts.inner
    single = tokens == 1 and not experts.is_partial  # all ids are of experts that are here
    if single:
        found, rows, most = None, x, pairs
    else:
        found = align(ids, experts.num_experts, tiles.rows, 0, x)
        rows, most = found.rows, found.most_tiles
        assert rows is not None
    between = x.new_empty(pairs, inner)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    dtype = torch.float32 if tokens <= FEW else x.dtype
    splits = tiles.down_splits if single else 1
    parts = torch.empty(pairs * splits, hidden, dtype=dtype, device=x.device)
    listed = ids, weights, found
    _product(experts, tiles, rows, between, listed, most, gated=True)
    _product(experts, tiles, between, out, listed, most, False, parts, shared, shared_gate)
    if not single:
        own = experts.num_experts if experts.is_partial else 0
        sum_pairs(parts, out, ids, own, shared, shared_gate)
    return out


def _product(
    experts: Any,
    tiles: HopperTiles,
    x: Tensor,
    out: Tensor,
    listed: tuple[Tensor, Tensor, AlignedPairs | None],
    most: int,
    gated: bool,
    parts: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> None:
    """listed: ids, weights, and the list of tiles, of which there are at most `most`."""
    from model_zoo.layers.moe.hopper.kernel import _experts_product

    ids, scores, found = listed
    stack = experts.gate_up if gated else experts.down
    weight = weight_of(stack, tiles.sync)
    bits = weight.constants["BITS"]
    ring = tiles.ring(bits, stack.inputs)
    height = HEIGHT // 2 if gated else HEIGHT
    row_tiles = -(-(experts.inner if gated else experts.hidden) // (height * tiles.groups))
    assert row_tiles * tiles.groups <= TILES and tiles.serves(1, experts.gate_up, experts.down)
    lists = (ids, None, None, None, None)
    if found is not None:
        lists = found.tiles, found.tile_rows, found.tile_counts, found.num_tiles, found.pairs
    k_blocks = -(-stack.inputs // ring.columns)
    splits = tiles.down_splits if found is None and not gated else 1
    assert k_blocks % splits == 0
    box = [height, ring.columns * bits // (16 if bits == 16 else 32)]
    _experts_product[(min(tiles.programs, most * splits * row_tiles),)](
        tma_desc(weight.words, box), tma_desc(x, [tiles.rows, ring.columns], weight.swizzle),
        *weight.tensors, *lists, scores, parts, workspace(x.device)[1], shared, shared_gate, out,
        found.pairs.shape[1] if found is not None else 1, stack.outputs, experts.inner,
        k_blocks // splits, row_tiles,
        tiles.ahead(bits, stack.inputs), -(-weight.columns // BLOCK),
        **weight.constants, ACTIVATION=experts.activation, SINGLE=found is None, GATED=gated,
        TOP_K=experts.top_k, SPLITS=splits, GROUPS=tiles.groups, STAGES=ring.stages,
        X_STAGES=ring.x_stages, SWIZZLE=weight.swizzle,
        REGISTERS=(3 * tiles.registers - 56) // 16 * 8, num_warps=4, maxnreg=tiles.registers,
        **dependent_launch(x.device),
    )  # fmt: skip
