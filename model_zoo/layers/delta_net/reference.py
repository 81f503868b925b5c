"""The gated delta net in PyTorch's operations: its definition, and how it runs on a CPU.

Per value head, with a state S [Dk, Dv] of the sequence, a token's query q and key k [Dk] of the
head's key head, its value v [Dv], decay g < 0 and step size beta:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S

q, k and v are silu of a causal depthwise convolution over time; q and k are L2-normalised, and q is
divided by sqrt(Dk); beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias).  The output is the
RMSNorm of each head's o, times silu(z) (Yang et al., "Gated Delta Networks", 2024; Qwen3-Next).

Each key head serves Hv / Hk consecutive value heads; qkv is [all q | all k | all v].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.delta_net.inputs import (
    CHUNK,
    MAX_DECODE_TOKENS,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)

L2_EPS = 1e-6
# (q, k [R, n, Hv, Dk], v [R, n, Hv, Dv], g, beta [R, n, Hv], S [R, Hv, Dk, Dv]) -> (o like v, S)
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token."""
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        predicted = torch.einsum("rhk,rhkv->rhv", k[:, t], state)
        delta = (v[:, t] - predicted) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        out[:, t] = torch.einsum("rhk,rhkv->rhv", q[:, t], state)
    return out, state


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in products of matrices: CHUNK tokens at once."""
    out = torch.empty_like(v)
    for at in range(0, q.shape[1], CHUNK):
        part = slice(at, at + CHUNK)
        tensors = (t[:, part].transpose(1, 2) for t in (q, k, v, g, beta))
        o, state = _chunk(*tensors, state)
        out[:, part] = o.transpose(1, 2)
    return out, state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [R, Hv, n, Dk], v [R, Hv, n, Dv], g, beta [R, Hv, n], state -> (o like v, state)."""
    total = g.cumsum(-1)  # the logarithm of the decay since before the chunk
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weighted = k * beta[..., None]
    system = (weighted @ k.mT * decay).tril(-1)  # + I, which `unitriangular` says
    values = v * beta[..., None] - (weighted * total.exp()[..., None]) @ state
    deltas = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    out = (q * total.exp()[..., None]) @ state + (q @ k.mT * decay) @ deltas
    left = (total[..., -1:] - total).exp()[..., None]
    return out, state * total[..., -1].exp()[..., None, None] + (k * left).mT @ deltas


def gated_delta_net_reference(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    delta_rule: DeltaRule | None = None,
) -> Tensor:
    """As gated_delta_net, in float32, or in float64 if qkv is; lengths are read on the host.

    delta_rule: for all rows; None: token after token for rows of few, by chunks for others
    """
    out = qkv.new_zeros(z.shape)
    starts = rows.cu_seqlens.tolist()
    lens = [end - begin for begin, end in pairwise(starts)]
    before = [int(length) - n for length, n in zip(rows.cache_seqlens, lens, strict=True)]
    for n, members in _pieces(lens, before, rows.snapshots):
        _run(n, members, starts, before, (qkv, z, b, a), weights, state, rows, delta_rule, out)
    return out


def _pieces(
    lens: list[int], before: list[int], snapshots: Snapshots | None
) -> list[tuple[int, list[tuple[int, int]]]]:
    """(number of tokens n, [(row, first of n tokens in the row)]): what can run together, in order.

    Rows of one length run together; those of which a state within is kept run alone, cut there.
    """
    kept = _kept_at(lens, before, snapshots)
    by_length: dict[int, list[tuple[int, int]]] = {}
    for row, n in enumerate(lens):
        if n and row not in kept:
            by_length.setdefault(n, []).append((row, 0))
    cut = [
        (last - first, [(row, first)])
        for row, places in kept.items()
        for first, last in pairwise([0, *places, lens[row]])
        if first < last
    ]
    return [*by_length.items(), *cut]


def _kept_at(
    lens: list[int], before: list[int], snapshots: Snapshots | None
) -> dict[int, list[int]]:
    """Of rows with snapshots, after how many of the row's tokens they are taken."""
    if snapshots is None:
        return {}
    kept: dict[int, list[int]] = {}
    table = zip(snapshots.first.tolist(), snapshots.slots.tolist(), strict=True)
    for row, (first, slots) in enumerate(table):
        for place, slot in enumerate(slots, first - before[row]):
            if slot >= 0 and 0 < place <= lens[row]:
                kept.setdefault(row, []).append(place)
    return kept


def _run(
    n: int,
    members: list[tuple[int, int]],
    starts: list[int],
    before: list[int],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    delta_rule: DeltaRule | None,
    out: Tensor,
) -> None:
    """n tokens of each of some rows, from and into their slots."""
    device = out.device
    wide = torch.promote_types(out.dtype, torch.float32)
    firsts = torch.tensor([starts[row] + at for row, at in members], device=device)
    tokens = firsts[:, None] + torch.arange(n, device=device)  # [R, n]
    slots = rows.slots.to(torch.int64)[torch.tensor([row for row, _ in members], device=device)]
    starts_at = torch.tensor([before[row] + at for row, at in members], device=device)
    continued = (starts_at > 0) & (slots >= 0)
    source = slots.clamp(min=0)
    positions, places = _last_positions(state, starts_at)
    old = state.conv[source[:, None], places].to(wide)  # [R, K, conv_dim]
    is_old = (positions >= 0) & (slots >= 0)[:, None]
    old = torch.where(is_old[..., None], old, torch.zeros_like(old))
    s = state.state[source].mT.to(wide).contiguous()  # bits of products depend on strides
    s = torch.where(continued[:, None, None, None], s, torch.zeros_like(s))
    qkv, z, b, a = (tensor[tokens].to(wide) for tensor in inputs)
    inputs_of_conv = torch.cat([old, qkv], 1)
    q, k, v = _heads(inputs_of_conv[:, 1:], weights.conv.to(wide), state)
    beta = b.sigmoid()
    g = -weights.a_log.to(wide).exp() * F.softplus(a + weights.dt_bias.to(wide))
    few = n <= MAX_DECODE_TOKENS or rows.token_by_token
    rule = delta_rule or (recurrent_delta_rule if few else chunked_delta_rule)
    o, s = rule(q, k, v, g, beta, s)
    normed = o * (o.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt()
    gated = normed * weights.norm.to(wide) * F.silu(z.view(o.shape))
    out[tokens] = gated.flatten(2).to(out.dtype)
    conv, ends_at = inputs_of_conv[:, n:], starts_at + n
    _store(state, conv, s, slots, ends_at)
    if rows.snapshots is not None:
        for member, (row, at) in enumerate(members):
            border = before[row] + at + n - int(rows.snapshots.first[row])
            if 0 <= border < rows.snapshots.slots.shape[1]:
                one = slice(member, member + 1)
                slot = rows.snapshots.slots[row, border][None]
                _store(state, conv[one], s[one], slot, ends_at[one])


def _last_positions(state: DeltaNetState, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Of sequences of so many tokens: the last K positions, and where these lie in a slot."""
    width = state.conv.shape[1]
    positions = lens[:, None] + torch.arange(-width, 0, device=lens.device)  # [R, K]
    return positions, positions % width


def _store(state: DeltaNetState, conv: Tensor, s: Tensor, slots: Tensor, lens: Tensor) -> None:
    """What sequences of so many tokens keep: conv [R, K, conv_dim], oldest first; s."""
    kept = slots >= 0
    positions, places = _last_positions(state, lens)
    row, column = torch.nonzero((positions >= 0) & kept[:, None], as_tuple=True)
    target = slots.long()[row], places[row, column]
    state.conv[target] = conv[row, column].to(state.conv.dtype)
    state.state[slots[kept].long()] = s[kept].mT.to(state.state.dtype)


def _heads(inputs: Tensor, conv: Tensor, state: DeltaNetState) -> tuple[Tensor, Tensor, Tensor]:
    """inputs [R, K - 1 + n, conv_dim] -> q, k [R, n, Hv, Dk], v [R, n, Hv, Dv]."""
    n = inputs.shape[1] - conv.shape[1] + 1
    mixed = F.silu(sum(inputs[:, j : j + n] * conv[:, j] for j in range(conv.shape[1])))
    _, value_heads, value_dim, key_dim = state.state.shape
    keys = state.key_heads * key_dim
    q, k, v = mixed.split([keys, keys, value_heads * value_dim], -1)
    group = value_heads // state.key_heads
    q, k = (_unit(x.unflatten(-1, (-1, key_dim))).repeat_interleave(group, 2) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (-1, value_dim))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
