"""Random layers and rows of the gated delta net, and their copies in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from model_zoo.layers.delta_net.inputs import (
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)


@dataclass(frozen=True, slots=True)
class DeltaNetCase:
    """The arguments of gated_delta_net."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor
    weights: DeltaNetWeights
    state: DeltaNetState
    rows: DeltaNetRows

    @property
    def arguments(self) -> tuple:
        return (self.qkv, self.z, self.b, self.a, self.weights, self.state, self.rows)

    def copy(self) -> DeltaNetCase:
        """With pools of its own."""
        state = DeltaNetState(self.state.conv.clone(), self.state.state.clone())
        return replace(self, state=state)

    def double(self) -> DeltaNetCase:
        """The same numbers in float64, on the CPU, with pools of their own."""
        to = {"device": "cpu", "dtype": torch.float64}
        w = self.weights
        return DeltaNetCase(
            *(t.to(**to) for t in (self.qkv, self.z, self.b, self.a)),
            DeltaNetWeights(
                *(t.to(**to) for t in (w.conv, w.a_log, w.dt_bias, w.norm)), norm_eps=w.norm_eps
            ),
            DeltaNetState(self.state.conv.to(**to).clone(), self.state.state.to(**to).clone()),
            rows_on(self.rows, "cpu"),
        )

    def part(self, first: int, last: int) -> DeltaNetCase:
        """Tokens first to last of a case of one row; the pools are shared."""
        before = int(self.rows.cache_seqlens) - len(self.qkv)
        rows = replace(
            self.rows,
            cu_seqlens=int32([0, last - first], self.qkv.device),
            cache_seqlens=int32([before + last], self.qkv.device),
            max_tokens=last - first,
        )
        tensors = (t[first:last] for t in (self.qkv, self.z, self.b, self.a))
        return DeltaNetCase(*tensors, self.weights, self.state, rows)


def int32(values: Sequence[int], device: str | torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def rows_on(rows: DeltaNetRows, device: str) -> DeltaNetRows:
    snapshots = rows.snapshots
    if snapshots is not None:
        snapshots = Snapshots(snapshots.first.to(device), snapshots.slots.to(device))
    return replace(
        rows,
        cu_seqlens=rows.cu_seqlens.to(device),
        cache_seqlens=rows.cache_seqlens.to(device),
        slots=rows.slots.to(device),
        snapshots=snapshots,
        chunks=None,
    )


def delta_net_case(
    lens: Sequence[int],
    before: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 16),
    conv_size: int = 4,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    free_slots: int = 2,
    slots: Sequence[int] | None = None,
    snapshots: Snapshots | None = None,
    alike: float = 0.0,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> DeltaNetCase:
    """Rows of `lens` tokens after `before` ones, and `padding` tokens.

    heads, dims: of keys and of values.  Slots are in a random order, with free ones between, and
    all have numbers; the pools' slots and the rows of tokens lie apart.
    alike:       0 to 1, how much all tokens have in common: at 1 all keys are equal
    """
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=make) * scale).to(dtype).to(device)

    (hk, hv), (dk, dv) = heads, dims
    conv_dim, tokens, pool = 2 * hk * dk + hv * dv, sum(lens) + padding, len(lens) + free_slots
    widths = [conv_dim, hv * dv, hv, hv]
    wide = (1 - alike) * normal(tokens, sum(widths) + 8) + alike * normal(sum(widths) + 8)
    wide = wide.to(dtype)
    qkv, z, b, a, _ = wide.split([*widths, 8], 1)
    weights = DeltaNetWeights(
        conv=normal(conv_dim, conv_size, scale=0.5),
        a_log=torch.empty(hv).uniform_(0.01, 8, generator=make).log().to(device),
        dt_bias=normal(hv, scale=0.5) - 2,
        norm=normal(dv, scale=0.1) + 1,
        norm_eps=1e-6,
    )
    conv, state = normal(pool, 2, conv_size, conv_dim), normal(pool, 2, hv, dv, dk, scale=0.3)
    if slots is None:
        slots = torch.randperm(pool, generator=make)[: len(lens)].tolist()
    before = before or [0] * len(lens)
    rows = DeltaNetRows(
        cu_seqlens=int32([0, *accumulate(lens)], device),
        cache_seqlens=int32([n + m for n, m in zip(lens, before, strict=True)], device),
        slots=int32(slots, device),
        max_tokens=max(lens, default=0),
        snapshots=snapshots,
    )
    pools = DeltaNetState(conv[:, 1], state.to(state_dtype)[:, 1])
    return DeltaNetCase(qkv, z, b, a, weights, pools, rows)
