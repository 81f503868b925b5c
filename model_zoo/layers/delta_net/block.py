"""DeltaNet: a gated delta net with its projections, in the place of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net, plan_rows
from model_zoo.layers.delta_net.inputs import (
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)
from model_zoo.layers.delta_net.tiles import PromptTiles
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.parallel.shard import Part

# Numbers: kernels read rows by vectors where addresses and strides are multiples of so many.
ALIGNED = 16


class DeltaNet(nn.Module):
    """index  of the layer among those with states
    name   of the block in the checkpoint
    """

    def __init__(
        self,
        config: DeltaNetConfig,
        *,
        index: int,
        name: str,
        hidden: int,
        eps: float,
        linears: LinearFactory,
    ) -> None:
        super().__init__()
        self.config, self.index, self.name, self.eps = config, index, name, eps
        self._shard = linears.shard
        self.token_by_token = False  # as in DeltaNetRows, for --deterministic
        self.tiles: PromptTiles | None = None  # as in gated_delta_net
        self.qkvz, self.ba = _projections(config, name, hidden, linears)
        self.out = linears.row(config.values_size, {f"{name}.out_proj": hidden}, bias=False)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        self.conv = parameter(config.conv_dim, config.conv_width, dtype=linears.dtype)
        self.a_log = parameter(config.value_heads, dtype=torch.float32)
        self.dt_bias = parameter(config.value_heads, dtype=torch.float32)
        self.norm = parameter(config.value_dim, dtype=linears.dtype)

    def input_scales(self, rows: int) -> None:
        """As Consumer.input_scales: its two projections have no common form but 16 bits."""

    def takes_normed(self, rows: int) -> bool:
        """As Consumer.takes_normed."""
        return all(linear.takes_normed(rows) for linear in (self.qkvz, self.ba) if linear)

    def multiply_first(self, x: Tensor | NormedRows) -> Tensor:
        """As Consumer.multiply_first."""
        return self.qkvz(x)

    @property
    def loads_ahead(self) -> bool:
        """As Consumer.loads_ahead."""
        return self.qkvz.loads_ahead

    def add(
        self,
        x: Tensor | NormedRows,
        residual: Tensor,
        inp: ModelInput,
        rows: DeltaNetRows,
        logit_rows: Tensor | None = None,
    ) -> tuple[Addend | None, Tensor]:
        """x, residual [T, hidden] -> (output or None, residual), as Attention.add.

        rows: those of the step, planned
        """
        config, pool = self.config, inp.kv.states
        assert pool is not None, "the KV pool was made without states"
        heads, qkvz = config.value_heads, [config.conv_dim, config.values_size]
        if self.ba is None:
            qkv, z, b, a = self.qkvz(x).split([*qkvz, heads, heads], 1)
        else:
            qkv, z = self.qkvz(x).split(qkvz, 1)
            b, a = self.ba(x).split(heads, 1)
        mixed = gated_delta_net(
            qkv,
            z,
            b,
            a,
            DeltaNetWeights(self.conv, self.a_log, self.dt_bias, self.norm, self.eps),
            DeltaNetState(pool.conv[self.index], pool.matrix[self.index]),
            rows,
            self.tiles,
        )
        if logit_rows is not None:
            mixed = mixed.index_select(0, logit_rows)
            residual = residual.index_select(0, logit_rows)
        return self.out.add(mixed, residual)

    @torch.no_grad()
    def fill_randomly(self) -> None:
        """The weights outside of its Linears, as of a model before its training."""
        for parameter in (self.conv, self.a_log, self.dt_bias):
            parameter.normal_(0.0, 0.02)
        self.norm.normal_(1.0, 0.02)

    def other_weights(self) -> dict[str, Tensor]:
        """As Model.other_weights."""
        return {
            f"{self.name}.conv1d.weight": self.conv[:, None],
            f"{self.name}.A_log": self.a_log,
            f"{self.name}.dt_bias": self.dt_bias,
            f"{self.name}.norm.weight": self.norm,
        }

    def other_parts(self) -> dict[str, Part | None]:
        """As Model.other_parts."""
        config, part = self.config, self._shard.part
        heads = part("outputs", (config.value_heads,))
        return {
            f"{self.name}.conv1d.weight": part("outputs", _blocks(config)),
            f"{self.name}.A_log": heads,
            f"{self.name}.dt_bias": heads,
        }


def _blocks(config: DeltaNetConfig) -> tuple[int, int, int]:
    """Queries, keys and values, which the checkpoint has in one tensor."""
    return config.keys_size, config.keys_size, config.values_size


def _projections(
    config: DeltaNetConfig, name: str, hidden: int, linears: LinearFactory
) -> tuple[Linear, Linear | None]:
    """To queries, keys, values and gates, and to b and a; None: the first is to all of them."""
    heads = config.value_heads
    if config.fused:
        each = heads // config.key_heads
        sizes = config.key_dim, config.key_dim, each * config.value_dim, each * config.value_dim
        return (
            linears.interleaved(hidden, f"{name}.in_proj_qkvz", sizes, config.key_heads),
            linears.interleaved(hidden, f"{name}.in_proj_ba", (each, each), config.key_heads),
        )
    qkvz = {f"{name}.in_proj_qkv": config.conv_dim, f"{name}.in_proj_z": config.values_size}
    ba = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
    blocks = {f"{name}.in_proj_qkv": _blocks(config)}
    plain = linears.scheme_of(qkvz, hidden) is None and linears.scheme_of(ba, hidden) is None
    if plain and 2 * heads % ALIGNED == 0:  # a launch less
        return linears.column(hidden, qkvz | ba, bias=False, blocks=blocks), None
    return (
        linears.column(hidden, qkvz, bias=False, blocks=blocks),
        linears.column(hidden, ba, bias=False),
    )


def delta_net_rows(inp: ModelInput, *, token_by_token: bool) -> DeltaNetRows:
    """The rows of a step, planned: once for all layers.  token_by_token: as in DeltaNetRows"""
    meta = inp.meta
    assert meta.state_slots is not None
    snapshots = None
    if meta.state_snapshots is not None:
        positions, states = meta.state_snapshots
        snapshots = Snapshots(positions, states[:, None])
    rows = DeltaNetRows(
        cu_seqlens=meta.cu_seqlens_q,
        cache_seqlens=meta.cache_seqlens,
        slots=meta.state_slots,
        max_tokens=meta.max_seqlen_q,
        snapshots=snapshots,
        token_by_token=token_by_token,
    )
    return plan_rows(rows, len(inp.tokens))


def use_token_by_token(model: nn.Module) -> None:
    """Let every DeltaNet of a model compute token by token, as DeltaNetRows says."""
    for module in model.modules():
        if isinstance(module, DeltaNet):
            module.token_by_token = True
