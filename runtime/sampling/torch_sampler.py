"""TorchSampler: logits -> tokens on a CPU.  Each feature costs time only for the rows that use it.

    grammar masks
    -> logit bias; banned sequences; repetition, presence and frequency penalties; stop ids masked
       before min_tokens; allowed_ids
    -> greedy rows take the largest logit
    -> others: temperature, top-k, top-p of what top-k left, min-p; then one sample by the inverse
       of the cumulative distribution

This needs one random number a row, where adding Gumbel noise needs one a token: with a vocabulary
of 150,000 that is most of the cost of sampling.

It is the definition that the kernels of a GPU are tested against.  Rows are sampled a few at a
time, since sampling needs some fifteen times the memory of float32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.messages import SamplingParams
from runtime.sampling.banned import BannedSequences
from runtime.sampling.cpu import TokenMask, sample_plain
from runtime.sampling.logprobs import LogprobsTensors, joined, score
from runtime.sampling.rng import UniformCache
from runtime.sampling.rows import ParamColumns, column, sample_rows, take
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.scheduler.batch import LAST, Batch, Int64Array, Masks, NewRow

GREEDY_BELOW = 1e-5  # a temperature under this would only overflow
CHUNK_LOGITS = 5 << 20  # logits sampled at once: 32 rows of 160,000
# In `counts`: the token occurs in the prompt.  The bits below count its occurrences in the output.
IN_PROMPT = 1 << 30
MAX_PARAM = 1 << 30

# The floats of SamplingParams are columns of the same name: a new one needs no line here.
_FLOATS = [field for field in msgspec.structs.fields(SamplingParams) if field.type is float]
_floats = attrgetter(*(field.name for field in _FLOATS))
_OPTIONAL = [field for field in _FLOATS if field.name not in ("temperature", "top_p")]
_optional = attrgetter(*(field.name for field in _OPTIONAL))
_OPTIONAL_OFF = tuple(field.default for field in _OPTIONAL)

PARAMS = np.dtype(
    [
        *((field.name, np.float32) for field in _FLOATS),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("prompt_len", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: not requested
        ("penalties", np.bool_),
        ("bias", np.bool_),
        ("allowed", np.bool_),
        ("banned", np.bool_),
        ("plain", np.bool_),  # all of the above but temperature, seed and prompt_len is off
    ]
)


class TorchSampler:
    """params [slots] of PARAMS; counts [slots, vocab] int32, of the rows with penalties."""

    def __init__(self, vocab_size: int, last_token: Tensor) -> None:
        """last_token [slots] int64: each slot's newest token, which sample() writes."""
        self.last_token = last_token
        num_slots = len(last_token)
        self.params = np.zeros(num_slots, dtype=PARAMS)
        self.banned = BannedSequences(num_slots, last_token.device)
        self._requests: list[SamplingParams | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self._uniforms = UniformCache(num_slots)
        self._counts: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Allocated when the first sequence with penalties arrives: most servers never see one."""
        if self._counts is None:
            shape = (len(self.params), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32)
        return self._counts

    def reset(self, new_rows: list[NewRow]) -> None:
        """See Sampler."""
        for row in new_rows:
            self.params[row.slot] = _columns(row)
            self._requests[row.slot] = row.params
            self._uniforms.reset(row.slot)
            self.banned.reset(row)
            if row.params.has_penalties:
                counts, history = self.counts[row.slot], torch.tensor(row.history)
                output = history[row.prompt_len :]
                counts.zero_()
                counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
                counts[history[: row.prompt_len]] += IN_PROMPT  # once, however often it occurs

    def sample(
        self, logits: Tensor, batch: Batch, rows: Int64Array, masks: Masks | None
    ) -> list[SamplerOutput]:
        """See Sampler."""
        ends = batch.starts[rows] + batch.q_lens[rows]
        allowed = AllowedMasks.of(masks, rows)
        output = self.sample_slots(logits, batch.slots[rows], ends, allowed)
        return [replace(output, rows=rows.tolist(), scored=rows[output.scored].tolist())]

    def sample_slots(
        self,
        logits: Tensor,
        slots: Int64Array,
        positions: Int64Array,
        allowed: AllowedMasks | None = None,
    ) -> SamplerOutput:
        """Sample a token for each row of logits [R, vocab], which may be overwritten; LAST if no
        token is allowed.

        slots [R] are those of the rows, positions [R] those of the sampled tokens in their
        sequences.  Updates the slots' last tokens and counts.  Computes in float32.
        """
        plain = self.params["plain"][slots]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        usable = torch.empty(len(logits), dtype=torch.bool)
        scored: list[int] = []
        scores: list[LogprobsTensors] = []
        widths = self.params["logprobs"][slots]
        width = int(widths.max(initial=-1))
        for selected, sample in ((plain, self._sample_plain), (~plain, self._sample_any)):
            for rows in _row_chunks(np.flatnonzero(selected), logits):
                inside = allowed
                if allowed is not None and len(rows) < len(logits):
                    inside = allowed.among(rows)
                chunk = _rows(logits, rows).float(), slots[rows], positions[rows], inside
                chosen, fine, chunk_scores = sample(*chunk, width)
                tokens.numpy()[rows], usable.numpy()[rows] = chosen, fine
                if chunk_scores is not None:
                    scores.append(chunk_scores)
                    scored += rows[widths[rows] >= 0].tolist()
        found = joined(scores) if scores else None
        return SamplerOutput([], tokens, usable, scored, widths[scored].tolist(), found)

    def _sample_plain(
        self,
        logits: Tensor,
        slots: Int64Array,
        positions: Int64Array,
        allowed: AllowedMasks | None,
        width: int,
    ) -> tuple[Int64Array, NDArray[np.bool_], None]:
        """Tokens of plain rows (`_is_plain`), and which rows are usable."""
        temperatures = self.params["temperature"][slots]
        sampled = temperatures >= GREEDY_BELOW
        numbers = np.zeros(len(sampled))
        rows = np.flatnonzero(sampled)
        if len(rows):
            numbers[rows] = self._random_numbers(slots[rows], positions[rows])
        limits = (np.empty(0, np.int64), np.empty((0, 0), np.uint8))
        if allowed is not None:
            limits = allowed.rows, allowed.bits
        tokens, usable = sample_plain(logits.numpy(), temperatures, numbers, sampled, *limits)
        self.last_token.numpy()[slots] = np.maximum(tokens, 0)
        return tokens, usable, None

    def _sample_any(
        self,
        logits: Tensor,
        slots: Int64Array,
        positions: Int64Array,
        allowed: AllowedMasks | None,
        width: int,
    ) -> tuple[Int64Array, NDArray[np.bool_], LogprobsTensors | None]:
        """Sample rows with any parameters; those that request log-probabilities get `width`."""
        params = self.params[slots]
        if allowed is not None and len(allowed.rows):
            token_mask = TokenMask(logits.shape[-1])
            for row, bits in zip(allowed.rows.tolist(), allowed.bits, strict=True):
                # Before log-probabilities are computed: they are of the allowed tokens.
                token_mask.apply(logits[row].numpy(), bits)
            params["min_tokens"][allowed.rows] = 0
        scored = np.flatnonzero(params["logprobs"] >= 0)
        raw = take(logits, scored).clone() if len(scored) else None
        self._adjust(logits, slots, params, positions)
        # NaN counts as larger than all.  64 rows of 32,000 in 0.09 ms on one core, where PyTorch
        # takes 1.0.
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        best = logits.gather(-1, tokens[:, None]).squeeze(-1)
        rows = np.flatnonzero((params["temperature"] >= GREEDY_BELOW) & (params["top_k"] != 1))
        if len(rows):
            numbers = self._random_numbers(slots[rows], positions[rows])
            chosen = sample_rows(take(logits, rows), take(best, rows), params[rows], numbers)
            tokens[torch.from_numpy(rows)] = chosen
        # Where no token is allowed, a step that is already queued may still read this token.
        self._record_tokens(tokens, slots, params)
        chosen = tokens.masked_fill(best == -torch.inf, LAST).numpy()
        usable = (best < torch.inf).numpy()  # no logit is NaN or +inf
        if raw is None:
            return chosen, usable, None
        scores = score(raw, take(tokens, scored), width)
        for row, slot in enumerate(slots[scored].tolist()):
            ids = self._params_of(slot).logprob_ids
            if ids:
                scores.top_ids[row, : len(ids)] = torch.tensor(ids)
                scores.top_logprobs[row, : len(ids)] = raw[row].log_softmax(-1)[list(ids)]
        return chosen, usable, scores

    def _params_of(self, slot: int) -> SamplingParams:
        params = self._requests[slot]
        assert params is not None, "the slot has had no sequence"
        return params

    def _random_numbers(self, slots: Int64Array, positions: Int64Array) -> NDArray[np.float64]:
        return self._uniforms.take(slots, self.params["seed"][slots], positions)

    def _record_tokens(self, tokens: Tensor, slots: Int64Array, params: ParamColumns) -> None:
        self.last_token[torch.from_numpy(slots)] = tokens
        rows = np.flatnonzero(params["penalties"])
        if len(rows):
            self.counts[torch.from_numpy(slots[rows]), take(tokens, rows)] += 1
        rows = np.flatnonzero(params["banned"])
        if len(rows):
            self.banned.record_tokens(torch.from_numpy(slots[rows]), take(tokens, rows))

    def _adjust(
        self, logits: Tensor, slots: Int64Array, params: ParamColumns, positions: Int64Array
    ) -> None:
        """Bias, penalties and masks, in place and only in the rows that use them."""
        for row in np.flatnonzero(params["bias"]).tolist():
            bias = self._params_of(slots[row]).logit_bias
            logits[row, list(bias)] += torch.tensor([*bias.values()])
        for row in np.flatnonzero(params["banned"]).tolist():
            self.banned.apply(logits[row], int(slots[row]))
        if params["penalties"].any():
            self._penalize(logits, slots, params)
        is_below_min_tokens = positions - params["prompt_len"] < params["min_tokens"]
        for row in np.flatnonzero(is_below_min_tokens).tolist():
            logits[row, list(self._params_of(slots[row]).stop_ids)] = -torch.inf
        for row in np.flatnonzero(params["allowed"]).tolist():
            allowed = list(self._params_of(slots[row]).allowed_ids)
            kept = logits[row, allowed]
            logits[row].clamp_(max=-torch.inf)  # NaN stays
            logits[row, allowed] = kept

    def _penalize(self, logits: Tensor, slots: Int64Array, params: ParamColumns) -> None:
        rows = np.flatnonzero(params["penalties"])
        counts = self.counts[torch.from_numpy(slots[rows])]  # [P, vocab]
        output = counts & (IN_PROMPT - 1)
        repetition = column(params["repetition_penalty"][rows])
        old = take(logits, rows)
        repeated = torch.where(old > 0, old / repetition, old * repetition)
        new = torch.where(counts > 0, repeated, old)
        new -= column(params["frequency_penalty"][rows]) * output
        new -= column(params["presence_penalty"][rows]) * (output > 0)
        logits[torch.from_numpy(rows)] = new


def _row_chunks(rows: Int64Array, logits: Tensor) -> Sequence[Int64Array]:
    """The rows in chunks of at most CHUNK_LOGITS logits."""
    at_once = max(1, CHUNK_LOGITS // logits.shape[-1])
    return [rows[first : first + at_once] for first in range(0, len(rows), at_once)]


def _rows(logits: Tensor, rows: Int64Array) -> Tensor:
    """The given rows, ascending; a view of the logits if they are adjacent."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return logits[first : last + 1]
    return take(logits, rows)


def _columns(row: NewRow) -> tuple[float | int | bool, ...]:
    """In the order of PARAMS.  Counts are clamped to its types, beyond any limit that matters."""
    params: SamplingParams = row.params
    return (
        *_floats(params),
        min(params.top_k, MAX_PARAM),
        row.seed & 0xFFFF_FFFF_FFFF_FFFF,
        row.prompt_len,
        min(params.min_tokens, MAX_PARAM),
        -1 if params.logprobs is None else min(params.logprobs, MAX_PARAM),
        params.has_penalties,
        bool(params.logit_bias),
        bool(params.allowed_ids),
        bool(params.banned),
        _is_plain(params),
    )


def _is_plain(params: SamplingParams) -> bool:
    """Whether sampling is greedy or at a temperature, without any other feature."""
    whole = params.top_k <= 0 and params.top_p >= 1 and _optional(params) == _OPTIONAL_OFF
    below_min_tokens = params.min_tokens > 0 and bool(params.stop_ids)
    changed = params.logit_bias or params.allowed_ids or params.banned
    return whole and not (below_min_tokens or changed) and params.logprobs is None
