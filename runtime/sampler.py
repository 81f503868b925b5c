"""Logits -> tokens.  Rows that ask for nothing pay for nothing.

    what the row's grammar does not allow is masked
    -> logit bias; repetition, presence and frequency penalties; stop ids masked before min_tokens;
       then all but the allowed tokens, and what would complete a banned sequence
    -> greedy rows take the largest logit
    -> others: temperature, top-k, top-p of what top-k left, min-p; then one draw by the inverse of
       the cumulative distribution

Drawing needs one random number a row, where adding Gumbel noise needs one a token: with a
vocabulary of 150,000 that is most of the cost of sampling.  The three filters keep the tokens at
or above one threshold, so tokens of equal probability stay or go together.

All of it needs some fifteen times the memory of float32 logits, so that rows are drawn a few at a
time: 256 rows of 150,000 would take 2.4 GB, which keys and values could not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device import upload
from runtime.noise import uniform
from runtime.scores import Scores, joined, score
from runtime.slots import IN_PROMPT, Slots

Ints = NDArray[np.int64]
Columns = NDArray[Any]  # slots.PARAMS, one entry a row

# [256, 8]: what each bit of a byte of a mask allows a logit to be at most.
BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)
GREEDY_BELOW = 1e-5  # a temperature under this would only overflow
# Weights, the largest of which is 1, are summed as integers: of floats the sum would depend on the
# order, and on a GPU that on the number of rows.
UNITS = 1 << 44  # of the largest: those of 2**18 tokens fit into 63 bits
LEAST = -80.0  # log of a weight that is no unit
PIECE = 5 << 20  # logits drawn at once: 32 rows of 160,000, enough to keep a GPU busy


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens [R] int64 and usable [R] bool on the device; scores of `scored`, some of the rows."""

    tokens: Tensor
    usable: Tensor  # False: the row's logits are not finite, and its token means nothing
    scored: list[int]
    widths: list[int]  # alternatives each scored row asked for
    scores: Scores | None


@dataclass(frozen=True, slots=True)
class Allowed:
    """Rows [M] of the logits that may take some tokens only: bits [M, ceil(vocab / 8)], token t is
    bit t % 8 of byte t // 8.  It settles where these rows may end, too."""

    rows: Ints
    bits: NDArray[np.uint8]

    def within(self, rows: slice) -> Allowed:
        """Of a part of the logits."""
        mine = (self.rows >= rows.start) & (self.rows < rows.stop)
        return Allowed(self.rows[mine] - rows.start, self.bits[mine])


def draw(
    logits: Tensor, slots: Slots, slot_ids: Ints, positions: Ints, allowed: Allowed | None = None
) -> Drawn:
    """Choose a token for each row of logits [R, vocab], which it may overwrite.

    slot_ids [R] name the slots of the rows, positions [R] the places that the tokens will take in
    their sequences.  Updates the slots' last tokens and counts.  Computes in float32.
    """
    wanted = slots.params["logprobs"][slot_ids]
    width = int(wanted.max(initial=-1))
    at_once = max(1, PIECE // logits.shape[-1])
    tokens: list[Tensor] = []
    usable: list[Tensor] = []
    scores: list[Scores] = []
    for first in range(0, len(logits), at_once):
        rows = slice(first, first + at_once)
        inside = None if allowed is None else allowed.within(rows)
        piece = logits[rows].float(), slots, slot_ids[rows], positions[rows], inside
        chosen, fine, scored = _draw(*piece, width)
        tokens.append(chosen)
        usable.append(fine)
        if scored is not None:
            scores.append(scored)
    scored_rows = np.flatnonzero(wanted >= 0)
    return Drawn(
        torch.cat(tokens),
        torch.cat(usable),
        scored_rows.tolist(),
        wanted[scored_rows].tolist(),
        joined(scores) if scores else None,
    )


def _draw(
    logits: Tensor,
    slots: Slots,
    slot_ids: Ints,
    positions: Ints,
    allowed: Allowed | None,
    width: int,
) -> tuple[Tensor, Tensor, Scores | None]:
    """draw, of so few rows that memory does not matter; those that want scores get `width`."""
    params = slots.params[slot_ids]
    if allowed is not None and len(allowed.rows):
        _mask(logits, allowed)
        params["min_tokens"][allowed.rows] = 0
    scored = np.flatnonzero(params["logprobs"] >= 0)
    raw = _take(logits, scored).clone() if len(scored) else None
    _adjust(logits, slots, slot_ids, params, positions)
    best, tokens = _largest(logits)
    usable = best.isfinite()  # the largest is finite only if none is NaN or +inf
    rows = np.flatnonzero((params["temperature"] >= GREEDY_BELOW) & (params["top_k"] != 1))
    if len(rows):
        numbers = uniform(params["seed"][rows], positions[rows])
        chosen = _draw_rows(_take(logits, rows), _take(best, rows), params[rows], numbers)
        tokens[upload(rows, tokens.device)] = chosen
    _remember(tokens, slots, slot_ids, params)
    if raw is None:
        return tokens, usable, None
    scores = score(raw, _take(tokens, scored), width)
    slots.sets.report(scores, raw, slot_ids[scored].tolist())
    return tokens, usable, scores


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row [R, vocab] and its place; NaN counts as larger than all."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # 64 rows of 32,000 in 0.09 ms on one core, where PyTorch takes 1.0.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, tokens[:, None]).squeeze(-1), tokens


def _mask(logits: Tensor, allowed: Allowed) -> None:
    """In place, before scores are taken: they are of the tokens that could be drawn."""
    vocab = logits.shape[-1]
    if logits.device.type == "cpu":
        # 16 rows of 128,000 in 0.4 ms; masked_fill takes 6 where it cannot foresee the next bit.
        for row, bits in zip(allowed.rows.tolist(), allowed.bits, strict=True):
            values = logits[row].numpy()
            np.minimum(values, BOUNDS.take(bits, axis=0).reshape(-1)[:vocab], out=values)
        return
    rows = upload(allowed.rows, logits.device)
    bounds = upload(BOUNDS, logits.device)[upload(np.array(allowed.bits), logits.device).long()]
    logits[rows] = torch.minimum(logits[rows], bounds.flatten(1)[:, :vocab])


def _take(tensor: Tensor, rows: Ints) -> Tensor:
    """The named rows: the tensor itself if that is all of them."""
    if len(rows) == len(tensor):
        return tensor
    # Rows are copied whole: on a CPU three times as fast as by tensor[...].
    return tensor.index_select(0, upload(rows, tensor.device))


def _remember(tokens: Tensor, slots: Slots, slot_ids: Ints, params: Columns) -> None:
    slots.last_token[upload(slot_ids, slots.device)] = tokens
    rows = np.flatnonzero(params["penalties"])
    if len(rows):
        slots.counts[upload(slot_ids[rows], slots.device), _take(tokens, rows)] += 1
    rows = np.flatnonzero(params["banned"])
    if len(rows):
        slots.sets.remember(upload(slot_ids[rows], slots.device), _take(tokens, rows))


def _adjust(logits: Tensor, slots: Slots, slot_ids: Ints, params: Columns, positions: Ints) -> None:
    """Bias, penalties and masks, in place and only in the rows that ask."""
    for row in np.flatnonzero(params["bias"]).tolist():
        bias = slots.bias[slot_ids[row]]
        assert bias is not None
        logits[row, bias[0]] += bias[1]
    if params["penalties"].any():
        _penalize(logits, slots, slot_ids, params)
    too_early = positions - params["prompt_len"] < params["min_tokens"]
    if too_early.any():
        _mask_stop_ids(logits, slots, slot_ids, np.flatnonzero(too_early))
    for row in np.flatnonzero(params["allowed"]).tolist():
        slots.sets.keep_allowed(logits[row], int(slot_ids[row]))
    for row in np.flatnonzero(params["banned"]).tolist():
        slots.sets.ban(logits[row], int(slot_ids[row]))


def _penalize(logits: Tensor, slots: Slots, slot_ids: Ints, params: Columns) -> None:
    rows = np.flatnonzero(params["penalties"])
    counts = slots.counts[upload(slot_ids[rows], logits.device)]  # [P, vocab]
    output = counts & (IN_PROMPT - 1)
    repetition = _column(params["repetition"][rows], logits)
    frequency = _column(params["frequency"][rows], logits)
    presence = _column(params["presence"][rows], logits)
    old = _take(logits, rows)
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    new = torch.where(counts > 0, repeated, old)
    new -= frequency * output
    new -= presence * (output > 0)
    logits[upload(rows, logits.device)] = new


def _mask_stop_ids(logits: Tensor, slots: Slots, slot_ids: Ints, rows: Ints) -> None:
    stop_ids = [slots.stop_ids[slot] for slot in slot_ids[rows].tolist()]
    where = np.repeat(rows, [len(ids) for ids in stop_ids])
    if not len(where):
        return
    what = np.fromiter((id for ids in stop_ids for id in ids), np.int64, len(where))
    on_device = upload(np.stack([where, what]), logits.device)
    # Not `logits[...] = -inf`: the number would be copied from pageable memory, which waits.
    logits.index_put_(on_device.unbind(), logits.new_full((), -torch.inf))


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """[N, 1] on the device."""
    return upload(np.array(values, order="C"), like.device)[:, None]


def _draw_rows(
    logits: Tensor, best: Tensor, params: Columns, numbers: NDArray[np.float64]
) -> Tensor:
    """One token a row [R]; `numbers` are uniform in (0, 1)."""
    # The largest becomes 0, so that no temperature can overflow: scaled = log(p / largest p).
    scaled = (logits - best[:, None]).div_(_column(params["temperature"], logits))
    # Less than this weighs nothing, and of -inf a CPU takes three times as long to say so.
    scaled.clamp_(min=LEAST)
    threshold = _threshold(scaled, params)
    below = None if threshold is None else scaled < threshold
    weights = _exp(scaled)
    if below is not None:
        weights.masked_fill_(below, 0)
    cumulative = _units(weights).cumsum(dim=-1)
    target = (cumulative[:, -1:] * _column(numbers, logits)).long()
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1)  # rows that are not finite can end anywhere


def _exp(values: Tensor) -> Tensor:
    """In place; on a CPU by NumPy, in half the time that one core takes with PyTorch."""
    if values.device.type != "cpu":
        return values.exp_()
    np.exp(values.numpy(), out=values.numpy())
    return values


def _threshold(scaled: Tensor, params: Columns) -> Tensor | None:
    """[R, 1]: the smallest log(p / largest p) that a row keeps; None if every row keeps all."""
    vocab = scaled.shape[-1]
    top_k = np.where((params["top_k"] <= 0) | (params["top_k"] > vocab), vocab, params["top_k"])
    top_p = np.where(params["top_p"] >= 1, np.inf, params["top_p"].astype(np.float64))
    threshold: Tensor | None = None
    if params["min_p"].any():
        with np.errstate(divide="ignore"):
            threshold = _column(np.log(params["min_p"]), scaled)
    rows = np.flatnonzero((top_k < vocab) | (top_p < np.inf))
    if len(rows):
        trimmed = scaled.new_full((len(scaled), 1), -torch.inf)
        least = _least_kept(_take(scaled, rows), top_k[rows], top_p[rows])
        trimmed[upload(rows, scaled.device)] = least
        threshold = trimmed if threshold is None else torch.maximum(threshold, trimmed)
    return threshold


def _least_kept(scaled: Tensor, top_k: Ints, top_p: NDArray[np.float64]) -> Tensor:
    """[R, 1]: the least likely token within both top_k and top_p of each row."""
    values = _sorted(scaled)
    weights = _units(values.exp())
    ranks = torch.arange(values.shape[-1], device=values.device)
    weights.masked_fill_(ranks >= _column(top_k, scaled), 0)
    reached = weights.cumsum(dim=-1)
    wanted = reached[:, -1:] * _column(top_p, scaled)
    # A token is kept while those before it have not reached the wanted mass; the first always is.
    kept = ((reached - weights < wanted) & (weights > 0)).sum(dim=-1, keepdim=True).clamp_(min=1)
    return values.gather(-1, kept - 1)


def _units(weights: Tensor) -> Tensor:
    """Weights of at most 1, which it overwrites, as int64; a power of two changes no digit.

    What is not finite means nothing, and does not matter.
    """
    return weights.mul_(UNITS).long()


def _sorted(values: Tensor) -> Tensor:
    """Each row with the largest first.

    On a CPU by NumPy, which uses vector instructions: 0.5 ms for 150,000 numbers where
    `torch.sort` takes 12 ms (one core of an AMD EPYC 9005).
    """
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values
