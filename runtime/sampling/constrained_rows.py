"""ConstrainedRows: sampling that a captured step leaves out, queued right after it.

    apply_masks  copies the rows' logits without the tokens that a grammar or allowed_ids excludes
    add_bias     logit bias; stop ids before min_tokens, where the step cannot hold so many
    ban          lowers the logits of tokens that would complete a banned sequence
    sample       samples the rows' tokens, with the kernels that the step uses for all other rows
    score        log-probabilities, also of tokens that the step has sampled

The host sends one block in one copy and never waits.  A row's path depends on its own parameters
alone, so other rows of the batch do not change its output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.transfers import PackedLayout, PackedUpload, upload
from runtime.messages import SamplingParams
from runtime.sampling.banned import BannedSequences
from runtime.sampling.kernels.apply_masks import WORD, add_bias, apply_masks, ban
from runtime.sampling.kernels.logprobs import ScoredRows, score
from runtime.sampling.kernels.sample import sample
from runtime.sampling.logprobs import LogprobsTensors
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.state import SamplerState, has_many_stop_ids
from runtime.scheduler.batch import Int64Array, NewRow

Int32Array = NDArray[np.int32]

ALIGNMENT = 8  # logits: rows begin at multiples of 32 bytes
UNMASKED = -1
NONE: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DeferredRows:
    """Rows of logits that `sample` does not complete, ascending.

    constrained: not sampled yet; scored: sampled, without their log-probabilities
    """

    constrained: Int64Array
    scored: Int64Array

    @property
    def rows(self) -> Int64Array:
        return np.concatenate([self.constrained, self.scored])


@dataclass(frozen=True, slots=True)
class LogitBias:
    """values [E], float32 viewed as int32, to be added to the logits of tokens [E]."""

    tokens: Int32Array = field(default_factory=lambda: NONE)
    values: Int32Array = field(default_factory=lambda: NONE)

    @classmethod
    def of(cls, values: dict[int, float]) -> LogitBias:
        count = len(values)
        numbers = np.fromiter(values.values(), np.float32, count)
        return cls(np.fromiter(values, np.int32, count), numbers.view(np.int32))


@dataclass(frozen=True, slots=True)
class RowConstraints:
    """The constraints of a slot's sequence.

    below_min_tokens: added instead of `bias` before position min_tokens_end
    allowed: [bytes], a mask as in Masks; num_logprobs: alternatives to report, -1: no
    log-probabilities; listed: ids whose log-probabilities are reported
    """

    bias: LogitBias
    below_min_tokens: LogitBias
    min_tokens_end: int
    allowed: NDArray[np.uint8] | None
    num_logprobs: int
    listed: Int32Array
    banned: bool

    @classmethod
    def of(cls, row: NewRow, vocab: int) -> RowConstraints:
        params: SamplingParams = row.params
        bias = below_min_tokens = LogitBias.of(params.logit_bias)
        if has_many_stop_ids(params):
            below_min_tokens = LogitBias.of(
                params.logit_bias | dict.fromkeys(params.stop_ids, -np.inf)
            )
        allowed = None
        if params.allowed_ids:
            flags = np.zeros(vocab, dtype=np.bool_)
            flags[list(params.allowed_ids)] = True
            allowed = np.packbits(flags, bitorder="little")
        listed = np.array(params.logprob_ids, dtype=np.int32)
        return cls(
            bias,
            below_min_tokens,
            row.prompt_len + params.min_tokens,
            allowed,
            -1 if params.logprobs is None else params.logprobs,
            listed,
            bool(params.banned),
        )


class ConstrainedRows:
    """Samples and scores DeferredRows; holds the constraints of the sequence in each slot."""

    def __init__(self, state: SamplerState, last_token: Tensor) -> None:
        """last_token [slots] int64: each slot's newest token, which sample() writes."""
        self._state, self._last_token = state, last_token
        self._banned = BannedSequences(len(last_token), state.device)
        self._constraints: list[RowConstraints | None] = [None] * len(last_token)
        self._words = -(-state.vocab_size // WORD.value)  # of a row's mask

    def reset(self, row: NewRow) -> None:
        """Store the constraints of a sequence that moves into a slot."""
        self._constraints[row.slot] = RowConstraints.of(row, self._state.vocab_size)
        self._banned.reset(row)

    def sample(
        self,
        logits: Tensor,
        all_slots: Int64Array,
        all_ends: Int64Array,
        deferred: DeferredRows,
        allowed: AllowedMasks | None,
    ) -> SamplerOutput:
        """Tokens of the constrained rows, and the log-probabilities that deferred rows request.

        logits [R, vocab] are not modified; all_slots [R] of their rows, all_ends [R] the positions
        of the sampled tokens.  The rows of `allowed` are indices into deferred.constrained.
        """
        upload_block = PackedUpload()
        slots, ends = all_slots[deferred.constrained], all_ends[deferred.constrained]
        row_constraints = self._constraints_of(slots)
        masks_at, bits_at = self._add_bits(upload_block, row_constraints, allowed)
        rows = deferred.rows
        every = row_constraints + self._constraints_of(all_slots[deferred.scored])
        widths = np.array([one.num_logprobs for one in every], dtype=np.int64)
        scored = np.flatnonzero(widths >= 0)
        masks_at_all = np.append(masks_at, np.full(len(deferred.scored), UNMASKED))
        lists = [
            (upload_block.add(every[place].listed), len(every[place].listed))
            for place in scored.tolist()
        ]
        first = upload_block.count
        for column in (deferred.constrained, slots, ends, bits_at):
            upload_block.add(column)
        for column in self._bias_columns(row_constraints, ends, masks_at):
            upload_block.add(column)
        listed_at, num_listed = np.array(lists, dtype=np.int64).reshape(-1, 2).T
        scored_rows = rows[scored]
        for column in (
            scored_rows, all_slots[scored_rows], masks_at_all[scored], listed_at, num_listed,
        ):  # fmt: skip
            upload_block.add(column)
        buffer, columns = upload_block.send(logits.device)
        words, columns = buffer.view(torch.int32), columns[first:]
        width = min(int(widths.max(initial=0)), self._state.vocab_size)
        layout = _output_layout(len(slots), len(scored), width)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=logits.device)
        tokens, usable, *rest = layout.views(memory)
        if len(slots):
            self._sample(logits, words, columns, slots, row_constraints, tokens, usable)
        scores = LogprobsTensors(*rest) if rest else None
        if scores is not None:
            score(logits, ScoredRows(*columns[7:]), words, self._last_token, scores)
        return SamplerOutput(
            deferred.constrained.tolist(),
            tokens,
            usable,
            scored_rows.tolist(),
            widths[scored].tolist(),
            scores,
            layout,
            memory,
        )

    def _sample(
        self,
        logits: Tensor,
        words: Tensor,
        columns: list[Tensor],
        slots: Int64Array,
        row_constraints: list[RowConstraints],
        tokens: Tensor,
        usable: Tensor,
    ) -> None:
        """Fill tokens, usable [S] of the constrained rows.

        columns: rows, slots, ends, masks [S]; rows, tokens and values of biases [E]
        """
        rows, slots_on_device, ends, bits_at, *bias = columns[:7]
        masked_logits = self._empty_logits(len(slots))
        apply_masks(logits, rows, bits_at, words, masked_logits)
        if len(bias[0]):
            add_bias(masked_logits, *bias)
        for place, slot in enumerate(slots.tolist()):
            table = self._banned.table(slot)
            if table is not None:
                ban(masked_logits[place], table, self._banned.recent[slot])
        sample(masked_logits, slots_on_device, ends, self._state, self._last_token, tokens, usable)
        banned = np.flatnonzero([constraints.banned for constraints in row_constraints])
        if len(banned):
            device = tokens.device
            chosen = tokens.index_select(0, upload(banned, device))
            self._banned.record_tokens(upload(slots[banned], device), chosen)

    def _constraints_of(self, slots: Int64Array) -> list[RowConstraints]:
        found = [self._constraints[slot] for slot in slots.tolist()]
        return [constraints for constraints in found if constraints is not None]

    def _add_bits(
        self,
        block: PackedUpload,
        row_constraints: list[RowConstraints],
        allowed: AllowedMasks | None,
    ) -> tuple[Int64Array, Int64Array]:
        """Where each row's mask begins: the grammar's alone, and combined with allowed_ids."""
        masks_at = np.full(len(row_constraints), UNMASKED)
        if allowed is not None and len(allowed.rows):
            first = block.add(self._as_words(allowed.bits))
            masks_at[allowed.rows] = first + np.arange(len(allowed.rows)) * self._words
        bits_at = masks_at.copy()
        for place, constraints in enumerate(row_constraints):
            if constraints.allowed is not None:
                bits = constraints.allowed[None]
                if allowed is not None and masks_at[place] >= 0:
                    bits = bits & allowed.bits[allowed.rows == place]
                bits_at[place] = block.add(self._as_words(bits))
        return masks_at, bits_at

    def _as_words(self, bits: NDArray[np.uint8]) -> Int32Array:
        """Masks [N, bytes] as int32; each row begins at a word."""
        if bits.shape[1] != 4 * self._words:
            bits = np.pad(bits, ((0, 0), (0, 4 * self._words - bits.shape[1])))
        return bits.reshape(-1).view(np.int32)

    def _bias_columns(
        self, row_constraints: list[RowConstraints], ends: Int64Array, masks_at: Int64Array
    ) -> list[NDArray[Any]]:
        """Rows, tokens and values.  Under a grammar, min_tokens does not mask stop ids."""
        biases = [
            constraints.below_min_tokens
            if end < constraints.min_tokens_end and mask_at < 0
            else constraints.bias
            for constraints, end, mask_at in zip(row_constraints, ends, masks_at, strict=True)
        ]
        places = np.repeat(np.arange(len(biases)), [len(bias.tokens) for bias in biases])
        tokens = np.concatenate([NONE, *(bias.tokens for bias in biases)])
        values = np.concatenate([NONE, *(bias.values for bias in biases)])
        return [places, tokens, values]

    def _empty_logits(self, rows: int) -> Tensor:
        """Uninitialized float32 logits [rows, vocab]: biases and penalties are not rounded."""
        vocab, device = self._state.vocab_size, self._state.device
        stride = -(-vocab // ALIGNMENT) * ALIGNMENT
        return torch.empty((rows, stride), dtype=torch.float32, device=device)[:, :vocab]


def _output_layout(rows: int, scored: int, width: int) -> PackedLayout:
    """Tokens, usable flags, and LogprobsTensors if any row is scored."""
    layout = PackedLayout((torch.int32, (rows,)), (torch.int8, (rows,)))
    if scored:
        layout.add(torch.float32, (scored,))
        layout.add(torch.int64, (scored,))
        layout.add(torch.int64, (scored, width))
        layout.add(torch.float32, (scored, width))
    return layout
