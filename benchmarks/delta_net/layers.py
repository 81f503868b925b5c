"""Layers of random gated delta nets in published shapes, and steps of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from model_zoo.layers.delta_net.inputs import DeltaNetRows, DeltaNetState, DeltaNetWeights
from model_zoo.layers.delta_net.reference import gated_delta_net_reference

BF16 = torch.bfloat16
KEY_HEADS, DIM, TAPS = 16, 128, 4
SHAPES = {"qwen3.6-27b": 48, "qwen3.6-35b-a3b": 32, "qwen3.5-122b-a10b": 64}  # value heads


@dataclass(frozen=True, slots=True)
class DeltaNetStep:
    """The arguments of gated_delta_net for a step of one layer."""

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

    @property
    def state_bytes(self) -> int:
        """Of all rows' states, read once and written once; of the last inputs, those that a
        convolution reaches are read, and those that tokens replace are written."""
        state, conv = self.state.state[0], self.state.conv[0]
        written = min(self.rows.max_tokens, len(conv)) * conv[0].nbytes
        read = (len(conv) - 1) * conv[0].nbytes
        return self.rows.num_rows * (2 * state.nbytes + read + written)

    @property
    def token_bytes(self) -> int:
        """Of all tokens' inputs and outputs."""
        return self.qkv.nbytes + 2 * self.z.nbytes + self.a.nbytes + self.b.nbytes


def make_step(
    value_heads: int, lens: list[int], before: int, state_dtype: torch.dtype, device: str
) -> DeltaNetStep:
    """Rows of `lens` tokens after `before` ones.  Nothing is zero: zeros take less power.

    Decays are those of trained layers: a state forgets in between 2 and 2000 tokens.
    """
    tokens, conv_dim = sum(lens), 2 * KEY_HEADS * DIM + value_heads * DIM
    widths = [conv_dim, value_heads * DIM, value_heads, value_heads]

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device).mul_(scale).to(BF16)

    qkv, z, b, a = noise(tokens, sum(widths)).split(widths, 1)
    weights = DeltaNetWeights(
        conv=noise(TAPS, conv_dim, scale=0.5).T,
        a_log=torch.empty(value_heads, device=device).uniform_(0.01, 8).log(),
        dt_bias=noise(value_heads).float() - 4,
        norm=noise(DIM, scale=0.1) + 1,
        norm_eps=1e-6,
    )
    slots = torch.randperm(len(lens), device=device)
    matrix = torch.randn(len(lens), value_heads, DIM, DIM, device=device).mul_(0.1)
    state = DeltaNetState(noise(len(lens), TAPS, conv_dim), matrix.to(state_dtype))

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = DeltaNetRows(
        cu_seqlens=integers([0, *accumulate(lens)]),
        cache_seqlens=integers([n + before for n in lens]),
        slots=slots.int(),
        max_tokens=max(lens),
    )
    return DeltaNetStep(qkv, z, b, a, weights, state, rows)


def exact(step: DeltaNetStep) -> tuple[Tensor, Tensor]:
    """-> (output, states) of the step in float64; the step's own pools stay as they are."""
    w, state = step.weights, step.state
    weights = replace(
        w, conv=w.conv.double(), a_log=w.a_log.double(), dt_bias=w.dt_bias.double(),
        norm=w.norm.double(),
    )  # fmt: skip
    pools = DeltaNetState(state.conv.double(), state.state.double())
    inputs = (tensor.double() for tensor in (step.qkv, step.z, step.b, step.a))
    out = gated_delta_net_reference(*inputs, weights, pools, step.rows)
    return out, pools.state


def error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean squared difference, over that of what was expected."""
    difference = found.double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())
