"""A strict fake executor: it answers rightly only if every cell of KV is right.

A KV cell holds all tokens up to its position, as the keys and values of a real model depend on all
of them.  A row reads every cell that one of its queries sees in each group of layers: one stale,
lost or aliased cell, or one that was freed too early, is noticed.  The next token is a hash of all
tokens.

In a model with recurrent states, a state holds all tokens of its sequence as well.

A decode row of several tokens computes drafts after its last token.  Some are the model's own next
tokens and some are not: the first wrong one and all after it are refused, and leave garbage in
their cells.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs

from runtime.config import ResolvedConfig
from runtime.messages import SamplingParams, TokenLogprob
from runtime.scheduler.batch import DRAFT, LAST, Batch, Masks, ModelRunnerOutput, NewRow
from runtime.scheduler.states.step_snapshots import FEW_TOKENS
from tests.support.engine.fake_grammar_process import MASK_BYTES, VOCAB_SIZE, mask_after

SPOILT = -9  # in a cell: what was written is no number
REFUSED = (-8,)  # a cell: a draft was written that the model does not continue with
Cell = tuple[int, ...] | None  # the tokens up to its position


def next_token(cells: Sequence[int], params: SamplingParams, prompt_len: int) -> int:
    """The fake model and sampler: a function of all cells, stop ids masked as params ask."""
    masked = params.stop_ids if len(cells) - prompt_len < params.min_tokens else ()
    digest = array("i", cells).tobytes()
    while True:
        digest = hashlib.blake2b(digest, digest_size=8).digest()
        token = int.from_bytes(digest, "little") % VOCAB_SIZE
        if token not in masked:
            return token


def plain_decoding(
    tokens: list[int], params: SamplingParams, *, max_model_len: int
) -> tuple[list[int], str]:
    """What the engine must answer: its tokens and why it ended."""
    known = list(tokens)
    if params.pooling is not None:
        return [], "stop"
    while True:
        token = next_token(known, params, len(tokens))
        known.append(token)
        if token in params.stop_ids:
            return known[len(tokens) :], "stop"
        if len(known) - len(tokens) == params.max_tokens or len(known) == max_model_len:
            return known[len(tokens) :], "length"


@dataclass
class FakeSlot:
    new: NewRow
    tables: list[list[int]]  # of each group
    last: int | None = None
    length: int = 0  # positions that are written for good
    refused: int = 0  # drafts of its last row
    last_row_in: int = -1  # number of the step of its last row
    num_pages: int = 0  # that it needs for all positions that its rows could have reached
    computed: list[int] = field(default_factory=list)  # since a sequence moved in
    sampled: list[int] = field(default_factory=list)  # the same


class FakePending:
    def __init__(self, run: Callable[[], ModelRunnerOutput]) -> None:
        self._run = run

    def wait(self) -> ModelRunnerOutput:
        return self._run()


class FakeExecutor:
    """Overlapping, it computes only when a result is waited for, in the order of the calls.

    right_drafts: how likely a draft is right
    """

    def __init__(
        self, config: ResolvedConfig, *, overlap: bool, right_drafts: float = 0.5, seed: int = 0
    ) -> None:
        self.overlap = overlap
        self.batches: list[Batch] = []  # as decoded
        self.fail_slots: dict[int, str] = {}  # slot -> error of its next row
        self.spoils: set[tuple[int, int]] = set()  # number of the batch, slot: writes no numbers
        self._forwarded = 0
        self._page_size = config.page_size
        self._config = config
        self._windows = config.group_windows
        self._cells: list[Cell] = [None] * (config.num_pages * config.page_size)
        self._states: list[Cell] = [None] * config.num_states
        self._snapshots: list[Cell] = [None] * config.num_snapshots
        self._written_by = [-1] * len(self._cells)  # the group that wrote a cell
        self._slots: dict[int, FakeSlot] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._read: list[list[int]] = []
        self._right_drafts, self._random = right_drafts, random.Random(seed)
        self._was_read = -1  # number of the step whose results were read last

    def forward(self, batch: Batch) -> None:
        batch = _as_lists(batch)
        self._check_shape(batch)
        self.batches.append(batch)
        unread = self.overlap and self._was_read < len(self.batches) - 2
        self._submit(lambda: self._forward(batch, unread))

    def sample(self, batch: Batch, masks: Masks | None = None) -> FakePending:
        assert batch.slots.tolist() == self.batches[-1].slots
        # A row that no longer samples is sampled all the same, and its tokens returned or not.
        unreported = [row for row, samples in enumerate(batch.sample) if not samples and row % 2]
        batch = self.batches[-1]
        rows = [] if masks is None else masks.rows
        bits = b"" if masks is None else masks.bits
        assert len(bits) == len(rows) * MASK_BYTES
        parts = [bits[start : start + MASK_BYTES] for start in range(0, len(bits), MASK_BYTES)]
        allowed = dict(zip(rows, parts, strict=True))
        results: list[ModelRunnerOutput] = []
        number = len(self.batches) - 1
        self._submit(lambda: results.append(self._sample(batch, allowed, unreported)))

        def wait() -> ModelRunnerOutput:
            while not results:
                self._queue.popleft()()
            self._was_read = number
            return results[0]

        return FakePending(wait)

    def _submit(self, work: Callable[[], None]) -> None:
        if self.overlap:
            self._queue.append(work)
        else:
            work()

    def _check_shape(self, batch: Batch) -> None:
        config, rows = self._config, len(batch.slots)
        assert 0 < rows <= config.max_num_seqs
        assert len(set(batch.slots)) == rows, "a slot occurs twice"
        assert all(0 <= slot < config.max_num_seqs for slot in batch.slots)
        for column in (batch.starts, batch.q_lens, batch.num_new_pages, batch.sample):
            assert len(column) == rows
        assert min(batch.q_lens) > 0, "a row without a token has no logits"
        assert sum(batch.q_lens) == batch.num_tokens <= config.max_batched_tokens
        assert sum(batch.num_new_pages) * len(self._windows) == len(batch.new_pages)
        decoding = batch.q_lens[: batch.decode_rows]
        assert all(length <= config.max_tokens_per_row for length in decoding)
        row_tokens = [
            LAST if place == 0 else DRAFT for length in decoding for place in range(length)
        ]
        assert batch.tokens[: len(row_tokens)] == row_tokens
        assert all(batch.sample[: batch.decode_rows])
        assert len(batch.state_slots) == (rows if self._states else 0)
        touched = [*batch.state_slots, *(source for source, _ in batch.state_copies)]
        touched += [state for _, _, state in batch.state_snapshots]
        assert len(set(touched)) == len(touched), "two rows share a state"
        assert set(touched) <= set(range(len(self._states)))
        fresh = [row.slot for row in batch.new_rows]
        assert len(set(fresh)) == len(fresh) and set(fresh) <= set(batch.slots)

    def _forward(self, batch: Batch, unread: bool) -> None:
        """`unread`: the results of the step before were not read when this one was scheduled."""
        for new in batch.new_rows:
            self._slots[new.slot] = FakeSlot(new, [[] for _ in self._windows])
        for source, target in batch.page_copies:
            for cell in range(self._page_size):
                at, to = (page * self._page_size + cell for page in (source, target))
                self._cells[to], self._written_by[to] = self._cells[at], self._written_by[at]
        for source, target in batch.state_saves:
            self._snapshots[target] = self._states[source]
        for source, target in batch.state_loads:
            self._states[target] = self._snapshots[source]
        for source, target in batch.state_copies:
            self._states[target] = self._states[source]
        pages, tokens = iter(batch.new_pages), iter(batch.tokens)
        columns = zip(batch.slots, batch.starts, batch.q_lens, batch.num_new_pages, strict=True)
        spans: list[tuple[FakeSlot, int, int]] = []
        number, self._forwarded = self._forwarded, self._forwarded + 1
        for row, (index, start, q_len, num_new_pages) in enumerate(columns):
            slot = self._slots[index]
            for _ in range(num_new_pages):
                for table in slot.tables:
                    table.append(next(pages))
            assert len(slot.tables[0]) <= self._config.max_pages_per_seq
            row_tokens = [next(tokens) for _ in range(q_len)]
            if row < batch.decode_rows:
                not_known = unread and slot.last_row_in == number - 1
                self._check_decode_row(slot, start, q_len, not_known)
                start, row_tokens = slot.length, self._drafted(slot, q_len)
            else:
                assert LAST not in row_tokens and DRAFT not in row_tokens
                slot.length = start + q_len
                slot.num_pages, least = len(slot.tables[0]), -(-slot.length // self._page_size)
                assert slot.num_pages >= least and (batch.sample[row] or slot.num_pages == least)
            slot.last_row_in = number
            spoilt = (number, index) in self.spoils
            known = self._tokens_before(slot, start)
            if self._states and start:
                assert self._states[batch.state_slots[row]] == known, "a state of other tokens"
            kept = {at: state for of, at, state in batch.state_snapshots if of == row}
            assert not kept or (q_len > FEW_TOKENS and row >= batch.decode_rows)
            assert len(kept) < 2 and all(start < at < start + q_len for at in kept)
            for position, token in enumerate(row_tokens, start):
                known = (*known, SPOILT if spoilt else token)
                if position + 1 in kept:
                    self._states[kept[position + 1]] = known
                for group, cell in enumerate(self._cells_of(slot, position)):
                    self._cells[cell], self._written_by[cell] = known, group
                slot.computed.append(token)
            if self._states:
                self._states[batch.state_slots[row]] = known
            spans.append((slot, start, start + q_len))
        # As on a GPU, all writes of a step come before its reads.
        self._read = [self._seen(*span) for span in spans]

    def _tokens_before(self, slot: FakeSlot, position: int) -> tuple[int, ...]:
        """What a query sees of the position before it, the same in all groups that show it."""
        found = [
            self._cell(slot, position - 1, group)
            for group, window in enumerate(self._windows)
            if window != 1 and position
        ]
        assert len(set(found)) <= 1, "the groups have other tokens"
        return found[0] if found else ()

    def _seen(self, slot: FakeSlot, start: int, end: int) -> list[int]:
        """All tokens of a row's sequence, after a look at every cell that one of its queries sees,
        from position `start` on."""
        tokens = self._cell(slot, end - 1, 0)
        for group, window in enumerate(self._windows):
            for position in range(max(0, start + 1 - window) if window else 0, end):
                cell = self._cell(slot, position, group)
                assert cell == tokens[: position + 1], "a cell of other tokens"
        return list(tokens)

    def _check_decode_row(self, slot: FakeSlot, start: int, q_len: int, not_known: bool) -> None:
        """Drafts whose results were `not_known` to the host count as accepted, no others."""
        assert start == slot.length + (slot.refused if not_known else 0), "a wrong length"
        params, end = slot.new.params, start + q_len
        longest = min(slot.new.prompt_len + params.max_tokens, self._config.max_model_len)
        assert end < longest, "a position that no token of the answer needs"
        assert q_len == 1 or not params.grammar, "drafts without a mask"
        slot.num_pages = max(slot.num_pages, -(-end // self._page_size))
        assert len(slot.tables[0]) == slot.num_pages, "more pages than were needed, or fewer"

    def _drafted(self, slot: FakeSlot, q_len: int) -> list[int]:
        """The last token of a slot, and what may come after it."""
        assert slot.last is not None, "the device has no last token for this slot"
        row_tokens, params = [slot.last], slot.new.params
        cells = list(self._tokens_before(slot, slot.length))
        while len(row_tokens) < q_len:
            token = next_token(cells + row_tokens, params, slot.new.prompt_len)
            wrong = self._random.random() >= self._right_drafts
            row_tokens.append((token + wrong) % VOCAB_SIZE)
        return row_tokens

    def _cells_of(self, slot: FakeSlot, position: int) -> list[int]:
        """The cell of a position in each group."""
        pages = [table[position // self._page_size] for table in slot.tables]
        assert min(pages) >= 0, "a page behind the window is used"
        return [page * self._page_size + position % self._page_size for page in pages]

    def _cell(self, slot: FakeSlot, position: int, group: int) -> tuple[int, ...]:
        page = slot.tables[group][position // self._page_size]
        assert page >= 0, "a page behind the window is read"
        cell = page * self._page_size + position % self._page_size
        tokens = self._cells[cell]
        assert tokens is not None, "a cell is read that was never written"
        assert self._written_by[cell] == group, "a cell of other layers"
        return tokens

    def _sample(
        self, batch: Batch, allowed: dict[int, bytes], unreported: list[int]
    ) -> ModelRunnerOutput:
        width = self._config.max_tokens_per_row
        tokens = np.full((len(batch.slots), width), LAST, dtype=np.int32)
        logprobs: list[list[TokenLogprob] | None] = []
        prompt_logprobs: list[list[TokenLogprob] | None] = []
        errors: dict[int, str] = {}
        embeddings: dict[int, bytes] = {}
        for row, (index, samples) in enumerate(zip(batch.slots, batch.sample, strict=True)):
            slot, cells = self._slots[index], self._read[row]
            params, prompt_len = slot.new.params, slot.new.prompt_len
            sampled: list[int] = []
            if samples:
                drafts = batch.q_lens[row] - 1 if row < batch.decode_rows else 0
                mask = allowed.pop(row, None)
                sampled = self._sample_row(slot, cells, drafts, mask)
                if row not in unreported:
                    tokens[row, : len(sampled)] = sampled
            if index in self.fail_slots:
                errors[row] = self.fail_slots.pop(index)
            if SPOILT in cells:
                errors[row] = "a cell that was read holds no number"
            wants = samples and params.logprobs is not None
            logprobs.append([_score(token) for token in sampled] if wants else None)
            first = max(1, batch.starts[row])
            row_tokens = cells[first : max(first, min(len(cells), prompt_len))]
            wants = params.prompt_logprobs is not None
            prompt_logprobs.append([_score(token) for token in row_tokens] if wants else None)
            if params.pooling is not None:
                assert not samples, "a prompt that is pooled samples nothing"
                if len(cells) == prompt_len and row not in errors:
                    # A mean is of all tokens computed; the last state reads the cells.
                    embeddings[row] = bytes(
                        slot.computed if params.pooling.kind == "mean" else cells
                    )
        assert not allowed, "masks of rows that do not sample"
        return ModelRunnerOutput(
            tokens,
            logprobs if any(logprobs) else None,
            prompt_logprobs if any(scores is not None for scores in prompt_logprobs) else None,
            errors,
            embeddings,
        )

    def _sample_row(
        self, slot: FakeSlot, cells: list[int], drafts: int, mask: bytes | None
    ) -> list[int]:
        """The tokens after a row's cells, of which the last `drafts` are drafts: those that are
        right, and the one after them.  The slot's length and cells are set back to these."""
        params, prompt_len = slot.new.params, slot.new.prompt_len
        known, drafted = cells[: len(cells) - drafts], cells[len(cells) - drafts :]
        if params.needs_history and SPOILT not in cells:
            assert slot.new.history + slot.sampled == known, "penalties count other tokens"
        sampled: list[int] = []
        while True:
            token = next_token(known + sampled, params, prompt_len)
            wanted = mask_after(known[prompt_len:]) if params.grammar else None
            if mask != wanted:
                token = (token + 1) % VOCAB_SIZE  # sampled under no mask, or a wrong one
            sampled.append(token)
            if len(sampled) > drafts or drafted[len(sampled) - 1] != token:
                break
        slot.length, slot.last = len(known) + len(sampled) - 1, token
        slot.refused = drafts - len(sampled) + 1
        for position in range(slot.length, len(cells)):
            for cell in self._cells_of(slot, position):
                self._cells[cell] = REFUSED
        slot.sampled += sampled
        return sampled


def _as_lists(batch: Batch) -> Any:
    """The batch with lists for columns."""
    fields = structs.asdict(batch)
    columns = {
        name: value.tolist() for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    return structs.replace(batch, **fields | columns)


def _score(token: int) -> TokenLogprob:
    return TokenLogprob(-token / VOCAB_SIZE, 1, [])
