"""Experts: the feed-forward networks of a mixture, and the tokens that each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.activation import activate
from model_zoo.layers.moe.expert_stack import ExpertProjection, ExpertStack
from model_zoo.layers.moe.tiles import Tiles, TilesByTokens
from model_zoo.moe_config import MoEConfig
from model_zoo.parallel.shard import Axis, Part
from model_zoo.quantization.quantize import quantize_fp8
from model_zoo.quantization.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the experts of a layer.

    In files that store one matrix for each expert: `{prefix}.{expert}.{gate}.weight`.  In files
    that store one for all: `{prefix}.gate_up_proj` and `{prefix}.down_proj`, as [E, out, in], or
    transposed as [E, in, out], which a square shape would not show: it belongs to the architecture.
    """

    prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False  # outputs of gate_up_proj are gate 0, up 0, gate 1, ...
    # Quantized weights, too, are in tensors of all experts: `{prefix}.gate_up_proj_blocks`, as
    # [E, out, ...] whether or not unquantized ones are transposed.
    stacked: bool = False

    def gate_up_parts(self, expert: int, size: int) -> dict[str, int]:
        """The layers of the checkpoint that make up an expert's first product -> outputs."""
        if self.stacked:
            return {f"{self.prefix}.gate_up_proj": 2 * size}
        name = f"{self.prefix}.{expert}"
        return {f"{name}.{self.gate}": size, f"{name}.{self.up}": size}

    def down_part(self, expert: int, size: int) -> dict[str, int]:
        name = "down_proj" if self.stacked else f"{expert}.{self.down}"
        return {f"{self.prefix}.{name}": size}


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor of the checkpoint that holds a matrix, or a bias, of every expert."""

    shape: tuple[int, ...]  # in the file
    # A view of the parameter, of as many elements in the same order; None: it is to be quantized.
    place: Tensor | None
    stack: ExpertStack
    interleaved: bool
    transposed: bool
    part: Part | None = None  # what the rank has of each expert's matrix; None: all

    @property
    def is_weight(self) -> bool:
        return len(self.shape) == 3

    @torch.no_grad()
    def quantize(self, stored: Tensor) -> None:
        """Store the file's tensor in the packed stack, as fp8 with a scale for each row."""
        for expert, weight in enumerate(stored):
            weight = self.gates_first(weight.T if self.transposed else weight)
            self.stack.store(expert, 0, quantize_fp8(weight))

    def gates_first(self, rows: Tensor) -> Tensor:
        """Rows [N, ...] of one expert in the stack's order."""
        if not self.interleaved:
            return rows
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    @torch.no_grad()
    def fill(
        self, tensors: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], QuantizedWeight]
    ) -> None:
        """Store quantized weights.

        tensors: of all experts, by suffix, each [E, N, ...]; read: what those of one expert mean
        """
        for expert in range(self.stack.experts):
            one = {suffix: self.gates_first(stored[expert]) for suffix, stored in tensors.items()}
            self.stack.store(expert, 0, read(one))


class Experts(nn.Module):
    """down(activation(gate(x), up(x))) of each expert, summed with the router's weights."""

    def __init__(
        self, config: MoEConfig, hidden: int, names: ExpertNames, linears: LinearFactory
    ) -> None:
        super().__init__()
        # Those that are here, which have the numbers from 0 in `ids`; others all have num_experts.
        self.own = config.own_experts
        self.num_experts, self.all_experts = len(self.own), config.router.num_experts
        self.is_partial, self.top_k = config.own is not None, config.router.top_k
        self.hidden, self.inner = hidden, config.intermediate_size
        self.activation, self.names, self.shard = config.activation, names, linears.shard
        self.has_shared, self.has_shared_gate = config.shared_size is not None, config.shared_gate
        self.gate_dtype = torch.float32 if config.router.computes_in_float32 else linears.dtype
        gate_up: dict[str, int] = {}
        down: dict[str, int] = {}
        for expert in self.own:
            gate_up |= names.gate_up_parts(expert, self.inner)
            down |= names.down_part(expert, hidden)
        self.gate_up = linears.experts(
            self.num_experts, 2 * self.inner, hidden, gate_up, bias=config.bias
        )
        # The ranks' outputs are added, so that the bias of an expert is that of one rank.
        bias = config.bias and (self.is_partial or linears.shard.rank == 0)
        self.down = linears.experts(self.num_experts, hidden, self.inner, down, bias=bias)
        self._tiles = TilesByTokens()
        self.is_batch_invariant = False

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    @property
    def is_packed(self) -> bool:
        return self.gate_up.packed is not None or self.down.packed is not None

    @property
    def is_float32(self) -> bool:
        return self.gate_up.dtype == torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.gate_up.nbytes + self.down.nbytes

    def projections(self) -> Iterator[ExpertProjection]:
        """The checkpoint's linear layers, where it stores one for each expert."""
        of_outputs, of_inputs = self._part("outputs", self.inner), self._part("inputs", self.inner)
        for place, expert in enumerate(self.own):
            first = 0
            for name, outputs in self.names.gate_up_parts(expert, self.inner).items():
                yield ExpertProjection(name, self.gate_up, place, first, outputs, of_outputs)
                first += outputs
            for name, outputs in self.names.down_part(expert, self.hidden).items():
                yield ExpertProjection(name, self.down, place, 0, outputs, of_inputs)

    def _part(self, axis: Axis, *blocks: int) -> Part | None:
        """What the rank has of each of its experts; None: all."""
        return None if self.is_partial else self.shard.part(axis, blocks)

    def stacked_tensors(self) -> dict[str, StackedTensor]:
        """The checkpoint's tensors, where it stores one for all experts."""
        found: dict[str, StackedTensor] = {}
        mixed = self.names.interleaved
        blocks = (2 * self.inner,) if mixed else (self.inner, self.inner)
        cuts = {
            "gate_up_proj": self._part("outputs", *blocks),
            "down_proj": self._part("inputs", self.inner),
        }
        for name, stack in {"gate_up_proj": self.gate_up, "down_proj": self.down}.items():
            split, cut = mixed and stack is self.gate_up, cuts[name]
            whole = f"{self.names.prefix}.{name}"
            found[whole] = _stacked(stack, stack.weight, split, self.names.transposed, cut)
            if stack.bias is not None:
                of_bias = cut if stack is self.gate_up else None
                found[f"{whole}_bias"] = _stacked(stack, stack.bias, split, False, of_bias)
        return found

    def use_tiles(self, tiles: Mapping[int, Tiles], *, batch_invariant: bool = False) -> None:
        """Set the kernels' tiles for numbers of tokens, as TilesByTokens.set.

        batch_invariant: they have one order of summation, and none is autotuned
        """
        self.is_batch_invariant = batch_invariant
        self._tiles.set(tiles)

    def update_tiles(self, tiles: Mapping[int, Tiles]) -> None:
        """As TilesByTokens.update."""
        self._tiles.update(tiles)

    def tiles_of(self, tokens: int) -> Tiles:
        """The tiles for so many tokens."""
        return self._tiles.of(tokens, self)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """The experts' weighted sum for each token, plus sigmoid(shared_gate) * shared -> [T, H].

        x:           [T, H]
        ids:         [T, k] int32, different ones in a row; of a rank that has some of the experts
                     num_experts for those that it has not, which are left out of the sum
        weights:     [T, k] float32
        shared:      [T, H], the shared expert's output, or None
        shared_gate: [T], or None for a factor of 1
        """
        if fused_kernels.use_fused_kernels(x.device):
            from model_zoo.layers.moe.run import run_experts

            return run_experts(self, x, ids, weights, shared, shared_gate)
        out = self._reference(x, ids, weights)
        if shared is not None:
            added = shared.float()
            if shared_gate is not None:
                added = added * shared_gate.float().sigmoid()[:, None]
            out += added
        return out.to(x.dtype)

    def _reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [T, H] float32, one expert after the other that has tokens."""
        out = torch.zeros(len(x), self.hidden, dtype=torch.float32, device=x.device)
        pairs = ids.flatten().long()
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=self.num_experts + 1).tolist()  # and of no expert here
        for expert, mine in enumerate(order.split(counts)[: self.num_experts]):
            if not len(mine):
                continue
            rows = mine // self.top_k
            inner = activate(self.gate_up.product(expert, x[rows]), self.activation)
            y = self.down.product(expert, inner).float()
            out.index_add_(0, rows, y * weights.flatten()[mine, None])
        return out


def _stacked(
    stack: ExpertStack,
    parameter: Tensor,
    interleaved: bool,
    transposed: bool,
    cut: Part | None,
) -> StackedTensor:
    """A parameter [E, N, K] or [E, N], with gates before ups, as a file stores it."""
    shape = (stack.experts, stack.outputs, stack.inputs)[: 2 if parameter is stack.bias else 3]
    stored = (shape[0], *reversed(shape[1:])) if transposed else shape
    if stack.packed is not None and parameter is stack.weight:
        return StackedTensor(stored, None, stack, interleaved, transposed, cut)
    place = parameter.data
    if interleaved:
        place = place.unflatten(1, (2, -1)).transpose(1, 2)  # [E, I, 2, K]
    if transposed:
        place = place.movedim(-1, 1)  # [E, K, N], or [E, K, I, 2]
    return StackedTensor(stored, place, stack, interleaved, transposed, cut)
