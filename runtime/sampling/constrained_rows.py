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

from runtime.executor.slots import SequenceSlots
from runtime.executor.transfers import upload
from runtime.messages import SamplingParams
from runtime.sampling.eager import AllowedMasks
from runtime.sampling.kernels.apply_masks import WORD, add_bias, apply_masks, ban
from runtime.sampling.kernels.logprobs import ScoredRows, score
from runtime.sampling.kernels.sample import sample
from runtime.sampling.logprobs import LogprobsTensors
from runtime.sampling.rows import take
from runtime.sampling.sampler_output import PackedTensors, SamplerOutput
from runtime.sampling.state import SamplerState, has_many_stop_ids
from runtime.scheduler.batch import Batch, Int64Array, NewRow

Int32Array = NDArray[np.int32]

ALIGNMENT = 8  # numbers, as in runtime/cuda_graph/input_block.py
UNMASKED = -1
NONE: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DeferredRows:
    """Rows of a batch that a captured step does not complete, ascending.

    constrained: not sampled yet; scored: sampled, without their log-probabilities
    """

    constrained: Int64Array
    scored: Int64Array

    def __bool__(self) -> bool:
        return len(self.constrained) + len(self.scored) > 0

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
    allowed: [bytes], a mask as in Masks; listed: ids whose log-probabilities are reported
    """

    bias: LogitBias
    below_min_tokens: LogitBias
    min_tokens_end: int
    allowed: NDArray[np.uint8] | None
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
        min_tokens_end = row.prompt_len + params.min_tokens
        return cls(bias, below_min_tokens, min_tokens_end, allowed, listed, bool(params.banned))


class UploadBlock:
    """Columns of int32 that are copied to the device at once."""

    def __init__(self) -> None:
        self._parts: list[tuple[slice, Int32Array]] = []
        self._length = 0

    def add(self, numbers: NDArray[Any]) -> slice:
        """Returns the slice of the block that will hold the numbers."""
        where = slice(self._length, self._length + len(numbers))
        self._parts.append((where, numbers))
        self._length += -(-len(numbers) // ALIGNMENT) * ALIGNMENT
        return where

    def send(self, device: torch.device) -> Tensor:
        """The block, [numbers] int32 on the device; the copy is asynchronous."""
        length = max(self._length, 1)
        staging = torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = staging.numpy()
        for where, part in self._parts:
            numbers[where] = part
        return staging.to(device, non_blocking=True)


class ConstrainedRows:
    """Samples and scores DeferredRows; holds the constraints of the sequence in each slot."""

    def __init__(self, slots: SequenceSlots, state: SamplerState) -> None:
        self._slots, self._state = slots, state
        self._constraints: list[RowConstraints | None] = [None] * len(slots.params)
        self._words = -(-slots.vocab_size // WORD.value)  # of a row's mask

    def reset(self, row: NewRow) -> None:
        """Store the constraints of a sequence that moves into a slot."""
        self._constraints[row.slot] = RowConstraints.of(row, self._slots.vocab_size)

    def sample_tokens(
        self, logits: Tensor, deferred: DeferredRows, batch: Batch, allowed: AllowedMasks | None
    ) -> SamplerOutput:
        """Tokens of the constrained rows, and the log-probabilities that `deferred.rows` request.

        logits [R, vocab] of the batch's rows are not modified.  The rows of `allowed` are indices
        into deferred.constrained.
        """
        block = UploadBlock()
        slots, ends = (
            batch.slots[deferred.constrained],
            (batch.starts + batch.q_lens)[deferred.constrained],
        )
        row_constraints = self._constraints_of(slots)
        masks_at, bits_at = self._add_bits(block, row_constraints, allowed)
        bias = self._add_bias(block, row_constraints, ends, masks_at)
        columns = [block.add(column) for column in (deferred.constrained, slots, ends, bits_at)]
        masks_at = np.append(masks_at, np.full(len(deferred.scored), UNMASKED))
        widths = self._slots.params["logprobs"][batch.slots[deferred.rows]]
        scored = np.flatnonzero(widths >= 0)
        score_columns = self._add_scored(block, deferred.rows[scored], batch, masks_at[scored])
        words = block.send(logits.device)
        width = min(int(widths.max(initial=0)), self._slots.vocab_size)
        packed = _packed_layout(len(slots), len(scored), width)
        memory = torch.empty(packed.num_bytes, dtype=torch.uint8, device=logits.device)
        tokens, usable, *rest = packed.of(memory)
        last_token = self._slots.last_token
        if len(slots):
            rows, slots_on_device, ends_on_device, bits_on_device = (
                words[column] for column in columns
            )
            masked_logits = self._empty_logits(len(slots))
            apply_masks(logits, rows, bits_on_device, words, masked_logits)
            if _length(bias[0]):
                add_bias(masked_logits, *(words[column] for column in bias))
            self._ban(masked_logits, slots, row_constraints)
            sample(
                masked_logits,
                slots_on_device,
                ends_on_device,
                self._state,
                last_token,
                tokens,
                usable,
            )
            self._record_tokens(tokens, slots, row_constraints)
        scores = LogprobsTensors(*rest) if rest else None
        if scores is not None:
            there = ScoredRows(*(words[column] for column in score_columns))
            score(logits, there, words, last_token, scores)
        scored_columns = scored.tolist(), widths[scored].tolist()
        return SamplerOutput(tokens, usable, *scored_columns, scores, packed, memory)

    def _constraints_of(self, slots: Int64Array) -> list[RowConstraints]:
        found = [self._constraints[slot] for slot in slots.tolist()]
        return [constraints for constraints in found if constraints is not None]

    def _add_bits(
        self,
        block: UploadBlock,
        row_constraints: list[RowConstraints],
        allowed: AllowedMasks | None,
    ) -> tuple[Int64Array, Int64Array]:
        """Where each row's mask begins: the grammar's alone, and combined with allowed_ids."""
        masks_at = np.full(len(row_constraints), UNMASKED)
        if allowed is not None and len(allowed.rows):
            first = block.add(self._as_words(allowed.bits)).start
            masks_at[allowed.rows] = first + np.arange(len(allowed.rows)) * self._words
        bits_at = masks_at.copy()
        for place, constraints in enumerate(row_constraints):
            if constraints.allowed is not None:
                bits = constraints.allowed[None]
                if allowed is not None and masks_at[place] >= 0:
                    bits = bits & allowed.bits[allowed.rows == place]
                bits_at[place] = block.add(self._as_words(bits)).start
        return masks_at, bits_at

    def _as_words(self, bits: NDArray[np.uint8]) -> Int32Array:
        """Masks [N, bytes] as int32; each row begins at a word."""
        if bits.shape[1] != 4 * self._words:
            bits = np.pad(bits, ((0, 0), (0, 4 * self._words - bits.shape[1])))
        return bits.reshape(-1).view(np.int32)

    def _add_bias(
        self,
        block: UploadBlock,
        row_constraints: list[RowConstraints],
        ends: Int64Array,
        masks_at: Int64Array,
    ) -> list[slice]:
        """Rows, tokens and values.  Under a grammar, min_tokens does not mask stop ids."""
        biased: list[tuple[int, LogitBias]] = []
        for place, constraints in enumerate(row_constraints):
            bias = constraints.bias
            if ends[place] < constraints.min_tokens_end and masks_at[place] < 0:
                bias = constraints.below_min_tokens
            biased.append((place, bias))
        places = np.repeat([place for place, _ in biased], [len(bias.tokens) for _, bias in biased])
        tokens = np.concatenate([NONE, *(bias.tokens for _, bias in biased)])
        values = np.concatenate([NONE, *(bias.values for _, bias in biased)])
        return [block.add(column) for column in (places, tokens, values)]

    def _add_scored(
        self, block: UploadBlock, rows: Int64Array, batch: Batch, masks_at: Int64Array
    ) -> list[slice]:
        """The columns of ScoredRows, [N] each."""
        slots = batch.slots[rows]
        lists = [block.add(constraints.listed) for constraints in self._constraints_of(slots)]
        starts, lengths = [found.start for found in lists], [_length(found) for found in lists]
        columns = (rows, slots, masks_at, starts, lengths)
        return [block.add(np.asarray(column, dtype=np.int32)) for column in columns]

    def _empty_logits(self, rows: int) -> Tensor:
        """Uninitialized float32 logits [rows, vocab]: biases and penalties are not rounded."""
        vocab, device = self._slots.vocab_size, self._slots.device
        stride = -(-vocab // ALIGNMENT) * ALIGNMENT
        return torch.empty((rows, stride), dtype=torch.float32, device=device)[:, :vocab]

    def _ban(
        self, masked_logits: Tensor, slots: Int64Array, row_constraints: list[RowConstraints]
    ) -> None:
        sets = self._slots.constraints
        for place, (slot, constraints) in enumerate(
            zip(slots.tolist(), row_constraints, strict=True)
        ):
            banned = sets.banned(slot) if constraints.banned else None
            if banned is not None:
                ban(masked_logits[place], banned, sets.recent[slot])

    def _record_tokens(
        self, tokens: Tensor, slots: Int64Array, row_constraints: list[RowConstraints]
    ) -> None:
        rows = np.flatnonzero([constraints.banned for constraints in row_constraints])
        if len(rows):
            device = tokens.device
            self._slots.constraints.record_tokens(upload(slots[rows], device), take(tokens, rows))


def _packed_layout(rows: int, scored: int, width: int) -> PackedTensors:
    """Tokens, usable flags, and LogprobsTensors if any row is scored."""
    tokens = (torch.int32, (rows,)), (torch.int8, (rows,))
    if not scored:
        return PackedTensors(*tokens)
    others = (torch.int64, (scored, width)), (torch.float32, (scored, width))
    return PackedTensors(*tokens, (torch.float32, (scored,)), (torch.int64, (scored,)), *others)


def _length(where: slice) -> int:
    return where.stop - where.start
