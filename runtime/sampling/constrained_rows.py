"""ConstrainedRows: what is left to do behind a step for rows that ask for more than it does.

    limit    their logits move aside, without what a grammar or a list of tokens does not allow
    shift    logit bias; stop ids before min_tokens, where the step cannot hold so many
    ban      what would complete a banned sequence
    sample   chooses their tokens, as the step has chosen those of all other rows
    score    log-probabilities, also of tokens that the step has chosen

All that the device has to be told is one block and one copy, and nothing waits.  Which way a row
goes depends on its own wishes alone, so that no neighbour changes its answer.
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
from runtime.sampling.kernels.apply_masks import WORD, ban, limit, shift
from runtime.sampling.kernels.logprobs import Scored, score
from runtime.sampling.kernels.sample import sample
from runtime.sampling.logprobs import LogprobsTensors
from runtime.sampling.rows import take
from runtime.sampling.sampler_output import PackedTensors, SamplerOutput
from runtime.sampling.state import SamplerState, has_many_stop_ids
from runtime.scheduler.batch import Batch, Int64Array, NewRow

Int32Array = NDArray[np.int32]

ALIGNMENT = 8  # numbers, as in step_buffers.py
NOT_LIMITED = -1
NONE: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class UnfinishedRows:
    """Rows of a batch that a step is not done with, both in their order.

    special: their tokens are still to be chosen; scored: only log-probabilities are missing
    """

    constrained: Int64Array
    scored: Int64Array

    def __bool__(self) -> bool:
        return len(self.constrained) + len(self.scored) > 0

    @property
    def rows(self) -> Int64Array:
        return np.concatenate([self.constrained, self.scored])


@dataclass(frozen=True, slots=True)
class Shifts:
    """values [E] float32, seen as int32, to be added to the logits of tokens [E]."""

    tokens: Int32Array = field(default_factory=lambda: NONE)
    values: Int32Array = field(default_factory=lambda: NONE)

    @classmethod
    def of(cls, values: dict[int, float]) -> Shifts:
        count = len(values)
        numbers = np.fromiter(values.values(), np.float32, count)
        return cls(np.fromiter(values, np.int32, count), numbers.view(np.int32))


@dataclass(frozen=True, slots=True)
class RowConstraints:
    """What a slot's sequence asks for.

    early: what is added instead of `shifts` before the position `settled`
    allowed: [bytes] as in Masks
    """

    shifts: Shifts
    below_min_tokens: Shifts
    min_tokens_end: int
    allowed: NDArray[np.uint8] | None
    listed: Int32Array
    banned: bool

    @classmethod
    def of(cls, row: NewRow, vocab: int) -> RowConstraints:
        params: SamplingParams = row.params
        shifts = below_min_tokens = Shifts.of(params.logit_bias)
        if has_many_stop_ids(params):
            below_min_tokens = Shifts.of(
                params.logit_bias | dict.fromkeys(params.stop_ids, -np.inf)
            )
        allowed = None
        if params.allowed_ids:
            flags = np.zeros(vocab, dtype=np.bool_)
            flags[list(params.allowed_ids)] = True
            allowed = np.packbits(flags, bitorder="little")
        listed = np.array(params.logprob_ids, dtype=np.int32)
        min_tokens_end = row.prompt_len + params.min_tokens
        return cls(shifts, below_min_tokens, min_tokens_end, allowed, listed, bool(params.banned))


class UploadBlock:
    """Columns of numbers that reach the device by one copy."""

    def __init__(self) -> None:
        self._parts: list[tuple[slice, Int32Array]] = []
        self._length = 0

    def add(self, numbers: NDArray[Any]) -> slice:
        """Returns where they will be."""
        where = slice(self._length, self._length + len(numbers))
        self._parts.append((where, numbers))
        self._length += -(-len(numbers) // ALIGNMENT) * ALIGNMENT
        return where

    def send(self, device: torch.device) -> Tensor:
        """[numbers] int32 on the device, which may not have them yet when this returns."""
        length = max(self._length, 1)
        staging = torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = staging.numpy()
        for where, part in self._parts:
            numbers[where] = part
        return staging.to(device, non_blocking=True)


class ConstrainedRows:
    def __init__(self, slots: SequenceSlots, state: SamplerState) -> None:
        self._slots, self._state = slots, state
        self._constraints: list[RowConstraints | None] = [None] * len(slots.params)
        self._words = -(-slots.vocab_size // WORD.value)  # of a row's bits

    def reset(self, row: NewRow) -> None:
        """A sequence moves in that asks for something."""
        self._constraints[row.slot] = RowConstraints.of(row, self._slots.vocab_size)

    def sample_tokens(
        self, logits: Tensor, unfinished: UnfinishedRows, batch: Batch, allowed: AllowedMasks | None
    ) -> SamplerOutput:
        """Tokens of the special rows, and the scores of those among `left.rows` that want them.

        logits [R, vocab] of the batch's rows are read only.  `allowed` numbers the special rows.
        """
        block = UploadBlock()
        slots, ends = (
            batch.slots[unfinished.constrained],
            (batch.starts + batch.q_lens)[unfinished.constrained],
        )
        row_constraints = self._constraints_of(slots)
        masks_at, bits_at = self._add_bits(block, row_constraints, allowed)
        shifts = self._add_shifts(block, row_constraints, ends, masks_at)
        columns = [block.add(column) for column in (unfinished.constrained, slots, ends, bits_at)]
        masks_at = np.append(masks_at, np.full(len(unfinished.scored), NOT_LIMITED))
        widths = self._slots.params["logprobs"][batch.slots[unfinished.rows]]
        scored = np.flatnonzero(widths >= 0)
        score_columns = self._add_scored(block, unfinished.rows[scored], batch, masks_at[scored])
        words = block.send(logits.device)
        width = min(int(widths.max(initial=0)), self._slots.vocab_size)
        packed = _packed_layout(len(slots), len(scored), width)
        memory = torch.empty(packed.num_bytes, dtype=torch.uint8, device=logits.device)
        tokens, usable, *rest = packed.of(memory)
        last_token = self._slots.last_token
        if len(slots):
            rows, slots_there, ends_there, bits_there = (words[column] for column in columns)
            scratch_logits = self._scratch_logits(len(slots))
            limit(logits, rows, bits_there, words, scratch_logits)
            if _length(shifts[0]):
                shift(scratch_logits, *(words[column] for column in shifts))
            self._ban(scratch_logits, slots, row_constraints)
            sample(scratch_logits, slots_there, ends_there, self._state, last_token, tokens, usable)
            self._record_tokens(tokens, slots, row_constraints)
        scores = LogprobsTensors(*rest) if rest else None
        if scores is not None:
            there = Scored(*(words[column] for column in score_columns))
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
        """Where the bits of each row begin: of its mask alone, and with its list of tokens."""
        masks_at = np.full(len(row_constraints), NOT_LIMITED)
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
        """Of bits [N, bytes], those of each row beginning with a word."""
        if bits.shape[1] != 4 * self._words:
            bits = np.pad(bits, ((0, 0), (0, 4 * self._words - bits.shape[1])))
        return bits.reshape(-1).view(np.int32)

    def _add_shifts(
        self,
        block: UploadBlock,
        row_constraints: list[RowConstraints],
        ends: Int64Array,
        masks_at: Int64Array,
    ) -> list[slice]:
        """Rows, tokens and values.  A row that a grammar limits ends where that says so."""
        some: list[tuple[int, Shifts]] = []
        for place, constraints in enumerate(row_constraints):
            if constraints.shifts is not constraints.below_min_tokens or len(
                constraints.shifts.tokens
            ):
                below_min_tokens = ends[place] < constraints.min_tokens_end and masks_at[place] < 0
                some.append(
                    (
                        place,
                        constraints.below_min_tokens if below_min_tokens else constraints.shifts,
                    )
                )
        places = np.repeat([place for place, _ in some], [len(found.tokens) for _, found in some])
        tokens = np.concatenate([NONE, *(found.tokens for _, found in some)])
        values = np.concatenate([NONE, *(found.values for _, found in some)])
        return [block.add(column) for column in (places, tokens, values)]

    def _add_scored(
        self, block: UploadBlock, rows: Int64Array, batch: Batch, masks_at: Int64Array
    ) -> list[slice]:
        """The columns of Scored."""
        slots = batch.slots[rows]
        lists = [block.add(constraints.listed) for constraints in self._constraints_of(slots)]
        starts, lengths = [found.start for found in lists], [_length(found) for found in lists]
        columns = (rows, slots, masks_at, starts, lengths)
        return [block.add(np.asarray(column, dtype=np.int32)) for column in columns]

    def _scratch_logits(self, rows: int) -> Tensor:
        """Room for logits [rows, vocab], exact enough for what will be added to them."""
        vocab, device = self._slots.vocab_size, self._slots.device
        stride = -(-vocab // ALIGNMENT) * ALIGNMENT
        return torch.empty((rows, stride), dtype=torch.float32, device=device)[:, :vocab]

    def _ban(
        self, scratch_logits: Tensor, slots: Int64Array, row_constraints: list[RowConstraints]
    ) -> None:
        sets = self._slots.sets
        for place, (slot, constraints) in enumerate(
            zip(slots.tolist(), row_constraints, strict=True)
        ):
            banned = sets.banned(slot) if constraints.banned else None
            if banned is not None:
                ban(scratch_logits[place], banned, sets.recent[slot])

    def _record_tokens(
        self, tokens: Tensor, slots: Int64Array, row_constraints: list[RowConstraints]
    ) -> None:
        rows = np.flatnonzero([constraints.banned for constraints in row_constraints])
        if len(rows):
            device = tokens.device
            self._slots.sets.record_tokens(upload(slots[rows], device), take(tokens, rows))


def _packed_layout(rows: int, scored: int, width: int) -> PackedTensors:
    """Tokens, whether they are usable, and Scores if any row is scored."""
    tokens = (torch.int32, (rows,)), (torch.int8, (rows,))
    if not scored:
        return PackedTensors(*tokens)
    others = (torch.int64, (scored, width)), (torch.float32, (scored, width))
    return PackedTensors(*tokens, (torch.float32, (scored,)), (torch.int64, (scored,)), *others)


def _length(where: slice) -> int:
    return where.stop - where.start
