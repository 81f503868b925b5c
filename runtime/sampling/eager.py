"""Eager sampling: logits -> tokens.  Each feature costs time only for the rows that use it.

    grammar masks
    -> logit bias; banned sequences; repetition, presence and frequency penalties; stop ids masked
       before min_tokens; allowed_ids
    -> greedy rows take the largest logit
    -> others: temperature, top-k, top-p of what top-k left, min-p; then one sample by the inverse
       of the cumulative distribution

This needs one random number a row, where adding Gumbel noise needs one a token: with a vocabulary
of 150,000 that is most of the cost of sampling.

Sampling needs some fifteen times the memory of float32 logits, so rows are sampled a few at a time:
256 rows of 150,000 would take 2.4 GB away from the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.slots import IN_PROMPT, SequenceSlots
from runtime.executor.transfers import upload
from runtime.sampling.cpu import BOUNDS, TokenMask, sample_plain
from runtime.sampling.logprobs import LogprobsTensors, joined, score
from runtime.sampling.rows import ParamColumns, column, sample_rows, take
from runtime.sampling.sampler_output import SamplerOutput
from runtime.scheduler.batch import LAST, Int64Array

GREEDY_BELOW = 1e-5  # a temperature under this would only overflow
CHUNK_LOGITS = 5 << 20  # logits sampled at once: 32 rows of 160,000, enough to keep a GPU busy


@dataclass(frozen=True, slots=True)
class AllowedMasks:
    """Grammar masks of rows [M] of the logits: bits [M, ceil(vocab / 8)], token t is bit t % 8 of
    byte t // 8.  They also decide whether these rows may end: min_tokens does not apply."""

    rows: Int64Array
    bits: NDArray[np.uint8]

    def among(self, rows: Int64Array) -> AllowedMasks:
        """The masks of some rows of the logits, ascending; renumbered among these."""
        places = np.searchsorted(rows, self.rows)
        mine = np.append(rows, -1)[places] == self.rows
        return AllowedMasks(places[mine], self.bits[mine])


def sample_tokens(
    logits: Tensor,
    slots: SequenceSlots,
    slot_ids: Int64Array,
    positions: Int64Array,
    allowed: AllowedMasks | None = None,
) -> SamplerOutput:
    """Sample a token for each row of logits [R, vocab], which may be overwritten; LAST if no token
    is allowed.

    slot_ids [R] are the slots of the rows, positions [R] those of the sampled tokens in their
    sequences.  Updates the slots' last tokens and counts.  Computes in float32.
    """
    plain = slots.params["plain"][slot_ids]
    if logits.device.type != "cpu" or not plain.any():
        return _sample_any(logits, slots, slot_ids, positions, allowed, np.arange(len(logits)))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    usable = torch.empty(len(logits), dtype=torch.bool)
    for rows in _row_chunks(np.flatnonzero(plain), logits):
        inside = allowed
        if allowed is not None and len(rows) < len(logits):
            inside = allowed.among(rows)
        chunk = _rows(logits, rows).float().numpy()
        found = _sample_plain(chunk, slots, slot_ids[rows], positions[rows], inside)
        tokens.numpy()[rows], usable.numpy()[rows] = found
        slots.last_token.numpy()[slot_ids[rows]] = np.maximum(found[0], 0)
    others = np.flatnonzero(~plain)
    if not len(others):
        return SamplerOutput(tokens, usable, [], [], None)
    output = _sample_any(logits, slots, slot_ids, positions, allowed, others)
    tokens.numpy()[others], usable.numpy()[others] = (
        output.tokens.numpy(),
        output.usable.numpy(),
    )
    return SamplerOutput(
        tokens,
        usable,
        others[output.scored].tolist(),
        output.widths,
        output.scores,
    )


def _row_chunks(rows: Int64Array, logits: Tensor) -> list[Int64Array]:
    """The rows in chunks of at most CHUNK_LOGITS logits."""
    at_once = max(1, CHUNK_LOGITS // logits.shape[-1])
    return [rows[first : first + at_once] for first in range(0, len(rows), at_once)]


def _rows(logits: Tensor, rows: Int64Array) -> Tensor:
    """The given rows, ascending; a view of the logits if they are adjacent."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return logits[first : last + 1]
    return take(logits, rows)


def _sample_plain(
    logits: NDArray[np.float32],
    slots: SequenceSlots,
    slot_ids: Int64Array,
    positions: Int64Array,
    allowed: AllowedMasks | None,
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Tokens of plain rows (`_is_plain` in slots.py) on a CPU, and which rows are usable."""
    temperatures = slots.params["temperature"][slot_ids]
    sampled = temperatures >= GREEDY_BELOW
    numbers = np.zeros(len(sampled))
    rows = np.flatnonzero(sampled)
    if len(rows):
        mine = slot_ids[rows]
        numbers[rows] = slots.uniforms.take(mine, slots.params["seed"][mine], positions[rows])
    limits = (np.empty(0, np.int64), np.empty((0, 0), np.uint8))
    if allowed is not None:
        limits = allowed.rows, allowed.bits
    return sample_plain(logits, temperatures, numbers, sampled, *limits)


def _sample_any(
    logits: Tensor,
    slots: SequenceSlots,
    slot_ids: Int64Array,
    positions: Int64Array,
    allowed: AllowedMasks | None,
    selected: Int64Array,
) -> SamplerOutput:
    """Sample the rows `selected` [N], ascending, with any parameters.  Rows of the output are
    numbered among these."""
    widths = slots.params["logprobs"][slot_ids[selected]]
    width = int(widths.max(initial=-1))
    tokens: list[Tensor] = []
    usable: list[Tensor] = []
    scores: list[LogprobsTensors] = []
    for rows in _row_chunks(selected, logits):
        inside = None if allowed is None else allowed.among(rows)
        chunk = _rows(logits, rows).float(), slots, slot_ids[rows], positions[rows], inside
        chosen, fine, scored = _sample_tokens(*chunk, width)
        tokens.append(chosen)
        usable.append(fine)
        if scored is not None:
            scores.append(scored)
    scored_rows = np.flatnonzero(widths >= 0)
    return SamplerOutput(
        torch.cat(tokens),
        torch.cat(usable),
        scored_rows.tolist(),
        widths[scored_rows].tolist(),
        joined(scores) if scores else None,
    )


def _sample_tokens(
    logits: Tensor,
    slots: SequenceSlots,
    slot_ids: Int64Array,
    positions: Int64Array,
    allowed: AllowedMasks | None,
    width: int,
) -> tuple[Tensor, Tensor, LogprobsTensors | None]:
    """Sample one chunk of rows; those that request log-probabilities get `width` of them."""
    params = slots.params[slot_ids]
    if allowed is not None and len(allowed.rows):
        _mask(logits, allowed)
        params["min_tokens"][allowed.rows] = 0
    scored = np.flatnonzero(params["logprobs"] >= 0)
    raw = take(logits, scored).clone() if len(scored) else None
    _adjust(logits, slots, slot_ids, params, positions)
    best, tokens = _largest(logits)
    usable = best < torch.inf  # no logit is NaN or +inf
    rows = np.flatnonzero((params["temperature"] >= GREEDY_BELOW) & (params["top_k"] != 1))
    if len(rows):
        numbers = slots.uniforms.take(slot_ids[rows], params["seed"][rows], positions[rows])
        chosen = sample_rows(take(logits, rows), take(best, rows), params[rows], numbers)
        tokens[upload(rows, tokens.device)] = chosen
    # Where no token is allowed, a step that is already queued may still read this token.
    _record_tokens(tokens, slots, slot_ids, params)
    chosen = tokens.masked_fill(best == -torch.inf, LAST)
    if raw is None:
        return chosen, usable, None
    scores = score(raw, take(tokens, scored), width)
    slots.constraints.report(scores, raw, slot_ids[scored].tolist())
    return chosen, usable, scores


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row [R, vocab] and its token; NaN counts as larger than all."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # 64 rows of 32,000 in 0.09 ms on one core, where PyTorch takes 1.0.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, tokens[:, None]).squeeze(-1), tokens


def _mask(logits: Tensor, allowed: AllowedMasks) -> None:
    """In place, before log-probabilities are computed: they are of the allowed tokens."""
    vocab = logits.shape[-1]
    if logits.device.type == "cpu":
        token_mask = TokenMask(vocab)
        for row, bits in zip(allowed.rows.tolist(), allowed.bits, strict=True):
            token_mask.apply(logits[row].numpy(), bits)
        return
    rows = upload(allowed.rows, logits.device)
    bounds = upload(BOUNDS, logits.device)[upload(np.array(allowed.bits), logits.device).long()]
    logits[rows] = torch.minimum(logits[rows], bounds.flatten(1)[:, :vocab])


def _record_tokens(
    tokens: Tensor, slots: SequenceSlots, slot_ids: Int64Array, params: ParamColumns
) -> None:
    slots.last_token[upload(slot_ids, slots.device)] = tokens
    rows = np.flatnonzero(params["penalties"])
    if len(rows):
        slots.counts[upload(slot_ids[rows], slots.device), take(tokens, rows)] += 1
    rows = np.flatnonzero(params["banned"])
    if len(rows):
        slots.constraints.record_tokens(upload(slot_ids[rows], slots.device), take(tokens, rows))


def _adjust(
    logits: Tensor,
    slots: SequenceSlots,
    slot_ids: Int64Array,
    params: ParamColumns,
    positions: Int64Array,
) -> None:
    """Bias, penalties and masks, in place and only in the rows that use them."""
    for row in np.flatnonzero(params["bias"]).tolist():
        bias = slots.bias[slot_ids[row]]
        assert bias is not None
        logits[row, bias[0]] += bias[1]
    for row in np.flatnonzero(params["banned"]).tolist():
        slots.constraints.ban(logits[row], int(slot_ids[row]))
    if params["penalties"].any():
        _penalize(logits, slots, slot_ids, params)
    is_below_min_tokens = positions - params["prompt_len"] < params["min_tokens"]
    if is_below_min_tokens.any():
        _mask_stop_ids(logits, slots, slot_ids, np.flatnonzero(is_below_min_tokens))
    for row in np.flatnonzero(params["allowed"]).tolist():
        slots.constraints.keep_allowed(logits[row], int(slot_ids[row]))


def _penalize(
    logits: Tensor, slots: SequenceSlots, slot_ids: Int64Array, params: ParamColumns
) -> None:
    rows = np.flatnonzero(params["penalties"])
    counts = slots.counts[upload(slot_ids[rows], logits.device)]  # [P, vocab]
    output = counts & (IN_PROMPT - 1)
    repetition = column(params["repetition_penalty"][rows], logits)
    frequency = column(params["frequency_penalty"][rows], logits)
    presence = column(params["presence_penalty"][rows], logits)
    old = take(logits, rows)
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    new = torch.where(counts > 0, repeated, old)
    new -= frequency * output
    new -= presence * (output > 0)
    logits[upload(rows, logits.device)] = new


def _mask_stop_ids(
    logits: Tensor, slots: SequenceSlots, slot_ids: Int64Array, rows: Int64Array
) -> None:
    stop_ids = [slots.stop_ids[slot] for slot in slot_ids[rows].tolist()]
    where = np.repeat(rows, [len(ids) for ids in stop_ids])
    if not len(where):
        return
    what = np.fromiter((id for ids in stop_ids for id in ids), np.int64, len(where))
    on_device = upload(np.stack([where, what]), logits.device)
    # Not `logits[...] = -inf`: the number would be copied from pageable memory, which waits.
    logits.index_put_(on_device.unbind(), logits.new_full((), -torch.inf))
