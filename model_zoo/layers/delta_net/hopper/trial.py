"""Random steps of a gated delta net, on which kernels are compared and timed at a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net, plan_rows
from model_zoo.layers.delta_net.inputs import (
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)
from model_zoo.layers.delta_net.tiles import PromptTiles

FREE_SLOTS = 2


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A row of so many tokens, of a sequence that had `before` ones; kept_at: the position of a
    snapshot, 0: none."""

    tokens: int
    before: int = 0
    kept_at: int = 0
    has_slot: bool = True


# Rows of all kinds: snapshots after a row's first tokens, within it, at its end; lengths that are
# no multiples of a chunk; rows that the decode kernel has, without a slot, without tokens.
ROWS = (
    TrialRow(700, 0, 128),
    TrialRow(1, 63),
    TrialRow(90, 10, 64),
    TrialRow(64, 64),
    TrialRow(0),
    TrialRow(330, 62, 64),
    TrialRow(140, 1, 128),
    TrialRow(9),
    TrialRow(70, 5, has_slot=False),
    TrialRow(131, 61, 192),
    TrialRow(4, 700),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """out [T, Hv * Dv]; pools as in DeltaNetState."""

    out: Tensor
    state: DeltaNetState


@dataclass(frozen=True, slots=True)
class TrialStep:
    """The arguments of gated_delta_net."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # qkv, z, b, a
    weights: DeltaNetWeights
    state: DeltaNetState
    rows: DeltaNetRows

    def run(self, tiles: PromptTiles) -> Tensor:
        """The step, whose states are changed."""
        return gated_delta_net(*self.inputs, self.weights, self.state, self.rows, tiles)

    def outcome(self, tiles: PromptTiles) -> Outcome:
        """Of a copy of the states."""
        state = DeltaNetState(self.state.conv.clone(), self.state.state.clone())
        return Outcome(replace(self, state=state).run(tiles), state)


def trial_step(
    config: DeltaNetConfig,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    rows: Sequence[TrialRow],
    *,
    padding: int,
    device: torch.device,
) -> TrialStep:
    """dtype: of tokens and weights.  The states of new sequences and of `padding` tokens are NaN,
    or what nobody reads."""
    make = torch.Generator(device).manual_seed(0)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).mul_(scale).to(dtype)

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    heads, dims = config.value_heads, (config.value_dim, config.key_dim)
    lens = [row.tokens for row in rows]
    widths = [config.conv_dim, config.values_size, heads, heads]
    qkv, z = noise(sum(lens) + padding, sum(widths[:2])).split(widths[:2], 1)
    b, a = noise(sum(lens) + padding, 2 * heads).split(heads, 1)
    weights = DeltaNetWeights(
        conv=noise(config.conv_dim, config.conv_width, scale=0.5),
        a_log=torch.empty(heads, device=device).uniform_(0.01, 8, generator=make).log(),
        dt_bias=noise(heads).float() - 4,
        norm=noise(config.value_dim, scale=0.1) + 1,
        norm_eps=1e-6,
    )
    kept = [row.kept_at for row in rows]
    slots = len(rows) + sum(at > 0 for at in kept) + FREE_SLOTS
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(0)).tolist()
    of_rows = [order.pop() if row.has_slot else -1 for row in rows]
    state = DeltaNetState(
        noise(slots, config.conv_width, config.conv_dim),
        noise(slots, heads, *dims, scale=0.1).to(state_dtype),
    )
    for row, slot in zip(rows, of_rows, strict=True):
        if row.tokens and not row.before and slot >= 0:
            state.conv[slot] = float("nan")
            state.state[slot] = float("nan")
    snapshots = None
    if any(kept):
        targets = [[order.pop() if at else -1] for at in kept]
        snapshots = Snapshots(integers(kept), torch.tensor(targets, dtype=torch.int32).to(device))
    made = DeltaNetRows(
        cu_seqlens=integers([0, *accumulate(lens)]),
        cache_seqlens=integers([row.tokens + row.before for row in rows]),
        slots=integers(of_rows),
        max_tokens=max(lens),
        snapshots=snapshots,
    )
    return TrialStep((qkv, z, b, a), weights, state, plan_rows(made, len(qkv)))


def without_snapshots(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """As in steps of a server without a prefix cache, whose kernels are compiled without them."""
    return [replace(row, kept_at=0) for row in rows]


def difference(found: Outcome, expected: Outcome) -> float:
    """The largest relative difference of a token's output or of a slot's state; infinite where the
    inputs of the convolution differ at all, since these are copied."""
    if not torch.equal(found.state.conv.nan_to_num(7), expected.state.conv.nan_to_num(7)):
        return float("inf")
    pairs = ((found.out, expected.out), (found.state.state, expected.state.state))
    return max(_relative(one.flatten(1), other.flatten(1)) for one, other in pairs)


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest of any row; what is infinite or NaN in one alone is infinitely far."""
    off = (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1).clamp(1e-30)
    same = (found == expected).all(1)  # also of zeros
    return float(torch.where(same, 0.0, off.nan_to_num(float("inf"))).max())
