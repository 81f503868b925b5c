"""DecodeColumns: the sequences that decode, as one array a field, by slot.

A step updates all of them with a few operations on whole arrays.  A Python loop over sequences
would be most of the host time of a step of 256 rows: while the device computes for some
milliseconds the CPU caches go cold, and each object would be fetched from memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import MAX_SEQS, ResolvedConfig
from runtime.scheduler.batch import LAST, Int64Array
from runtime.scheduler.kv_cache.page_pool import TOKEN_BYTES
from runtime.scheduler.sequence import Sequence

NO_SEQUENCE = -1
EMPTY: Int64Array = np.zeros(0, dtype=np.int64)
ONES: Int64Array = np.ones(MAX_SEQS, dtype=np.int64)  # never written to


class RequestColumns(NamedTuple):
    """The request of each row, as arrays; an `arrival_index` is never used for two sequences."""

    slots: Int64Array
    ids: Int64Array
    clients: Int64Array
    arrival_index: Int64Array

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> RequestColumns:
        """Those at some indices, or where a mask is true."""
        return RequestColumns(*[column[rows] for column in self])


class DecodeRows(NamedTuple):
    """The decode rows of a step."""

    requests: RequestColumns
    starts: Int64Array  # the largest possible: drafts of the row before may be refused
    q_lens: Int64Array
    num_tokens: int  # the sum of q_lens
    new_page_rows: Int64Array  # rows that get a page in each group, once for each, and
    new_pages: list[int]  # these pages, those of all groups side by side

    @property
    def slots(self) -> Int64Array:
        return self.requests.slots

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that the rows read."""
        return int(np.add.reduce(self.starts))


class FullPage(NamedTuple):
    """A sequence whose newest tokens fill a page; `content` are they if all of them are new."""

    sequence: Sequence
    content: bytes


NO_REQUESTS = RequestColumns(EMPTY, EMPTY, EMPTY, EMPTY)
NO_DECODE_ROWS = DecodeRows(NO_REQUESTS, EMPTY, EMPTY, 0, EMPTY, [])


class DecodeColumns:
    """Arrays indexed by slot, valid in `slots`.  They are the only record of these numbers.

    num_computed_tokens  positions of the KV cache that are written or queued to be, at most: a row
                         in flight counts as if all of its drafts were accepted
    kv_limit             its largest value: no position is written for the last token
    max_drafts           of a row, after its last token
    page_room            positions that the page tables of the sequence reach, in each group
    schedule_check_at    from this num_computed_tokens on, a row with max_drafts reaches beyond
                         kv_limit or page_room
    known                tokens known on the host
    recent               [slot, position % page_size]: the newest known tokens, at most a page
    commit_check_at      at this `known` the next token follows a full page or is the last one
    """

    def __init__(self, resolved: ResolvedConfig, vocab_size: int) -> None:
        num_slots, page_size = resolved.max_num_seqs, resolved.page_size

        def column() -> Int64Array:
            return np.zeros(num_slots, dtype=np.int64)

        self.slots: Int64Array = EMPTY  # in the order of entry
        self._all_requests: RequestColumns | None = None  # cached until a sequence enters or leaves
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._ids, self._clients, self._arrival_index = column(), column(), column() + NO_SEQUENCE
        self._num_computed_tokens, self._schedule_check_at = column(), column()
        self._kv_limit, self._page_room, self._max_drafts = column(), column(), column()
        self.known, self._commit_check_at = column(), column()
        self._recent = np.zeros((num_slots, page_size), dtype=np.int32)
        self._page_size, self._num_groups = page_size, resolved.num_groups
        self._num_drafts = resolved.num_speculative_tokens
        self._vocab_size = vocab_size
        self._stop_id_counts: Counter[int] = Counter()  # token id -> sequences that stop at it
        # Whether any sequence stops at a token id; the last entry stands for invalid ids.
        self._is_stop_id = np.zeros(vocab_size + 1, dtype=np.bool_)
        self._is_stop_id[vocab_size] = True

    def all(self) -> list[Sequence]:
        return self._at(self.slots)

    def _at(self, slots: Int64Array) -> list[Sequence]:
        found: Iterable[Sequence | None] = map(self._sequences.__getitem__, slots.tolist())
        return [sequence for sequence in found if sequence is not None]

    def has(self, sequence: Sequence) -> bool:
        return sequence.slot >= 0 and self._sequences[sequence.slot] is sequence

    def add_sequence(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._all_requests = None
        self.slots = np.append(self.slots, slot)
        self._sequences[slot] = sequence
        self._ids[slot], self._clients[slot] = sequence.request_id, sequence.request.client
        self._arrival_index[slot] = sequence.arrival_index
        self._num_computed_tokens[slot] = sequence.num_computed_tokens
        self._kv_limit[slot] = sequence.max_len - 1
        # The mask of a token depends on those before it, so there is none for drafts.
        constrained = bool(sequence.request.params.grammar)
        self._max_drafts[slot] = 0 if constrained else self._num_drafts
        self._page_room[slot] = len(sequence.pages.tables[0]) * self._page_size
        self._set_schedule_check(slot)
        self.sync_tokens(sequence)
        self._stop_id_counts.update(sequence.stop_ids)
        self._is_stop_id[list(sequence.stop_ids)] = True

    def _set_schedule_check(self, slots: int | Int64Array) -> None:
        check_at = np.minimum(self._kv_limit[slots], self._page_room[slots])
        if self._num_drafts:
            check_at = check_at - self._max_drafts[slots]
        self._schedule_check_at[slots] = check_at

    def remove_sequence(self, sequence: Sequence) -> None:
        """Flush its tokens, and note whether a row of it is in flight."""
        self.flush_tokens(sequence)
        slot = sequence.slot
        sequence.has_unread_row = bool(self._num_computed_tokens[slot] >= len(sequence.tokens))
        self._stop_id_counts.subtract(sequence.stop_ids)
        for token in sequence.stop_ids:
            self._is_stop_id[token] = self._stop_id_counts[token] > 0
        self._sequences[slot] = None
        self._arrival_index[slot] = NO_SEQUENCE
        self._all_requests = None
        self.slots = self.slots[self.slots != slot]

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Positions that are written or queued to be."""
        return int(self._num_computed_tokens[sequence.slot])

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that the rows of a step read."""
        return int(self._num_computed_tokens[self.slots].sum())

    def flush_tokens(self, sequence: Sequence) -> None:
        """Append to its `tokens` those that are only in the arrays."""
        missing = int(self.known[sequence.slot]) - len(sequence.tokens)
        if missing:
            first = len(sequence.tokens) % self._page_size
            sequence.tokens += self._recent[sequence.slot, first : first + missing].tolist()

    def sync_tokens(self, sequence: Sequence) -> None:
        """Update the arrays after a token was appended to `sequence.tokens`."""
        slot, known = sequence.slot, len(sequence.tokens)
        page_end = -(-known // self._page_size) * self._page_size
        self.known[slot] = known
        self._commit_check_at[slot] = min(sequence.max_len - 1, page_end)

    # Scheduling a step.

    def select_rows(self, max_tokens: int, tokens_per_row: int) -> DecodeRows:
        """The next step's rows of 1 .. tokens_per_row tokens each, without their pages yet.

        A sequence that may have all its tokens by now, if all drafts are accepted, has no row until
        the step in flight is committed.  Drafts take at most half of `max_tokens`.
        """
        if self._all_requests is None:
            self._all_requests = self._columns_of(self.slots)
        rows = self._rows_of(self._all_requests, max_tokens, tokens_per_row)
        if rows is None:
            incomplete = self._num_computed_tokens[self.slots] < self._kv_limit[self.slots]
            requests = self._columns_of(self.slots[incomplete][:max_tokens])
            rows = self._rows_of(requests, max_tokens, tokens_per_row)
            assert rows is not None
        return rows

    def _rows_of(
        self, requests: RequestColumns, max_tokens: int, tokens_per_row: int
    ) -> DecodeRows | None:
        """A row for each request; None if one is complete or they are more than `max_tokens`."""
        slots, count = requests.slots, len(requests.slots)
        if count > max_tokens:
            return None
        starts, q_lens = self._num_computed_tokens[slots], ONES[:count]
        if tokens_per_row > 1:
            tokens_per_row = max(1, min(tokens_per_row, max_tokens // max(2 * count, 1)))
            q_lens = np.minimum(self._max_drafts[slots] + 1, tokens_per_row)
        rows = (starts >= self._schedule_check_at[slots]).nonzero()[0]
        if len(rows):
            slots, first = slots[rows], starts[rows]
            remaining = self._kv_limit[slots] - first
            if np.count_nonzero(remaining <= 0):
                return None
            if tokens_per_row > 1:
                q_lens[rows] = np.minimum(q_lens[rows], remaining)
            if self._num_drafts:  # otherwise each of them is at the end of its last page
                missing = first + q_lens[rows] - self._page_room[slots]
                rows = np.repeat(rows, np.maximum(-(-missing // self._page_size), 0))
        num_tokens = count if tokens_per_row == 1 else int(np.add.reduce(q_lens))
        return DecodeRows(requests, starts, q_lens, num_tokens, rows, [])

    def _columns_of(self, slots: Int64Array) -> RequestColumns:
        return RequestColumns(
            slots, self._ids[slots], self._clients[slots], self._arrival_index[slots]
        )

    def schedule_rows(self, rows: DecodeRows, pages: list[int]) -> None:
        """Schedule the rows of select_rows(), with a page of each group for each of their
        `new_page_rows`."""
        self._num_computed_tokens[rows.slots] = rows.starts + rows.q_lens
        if not pages:
            return
        rows.new_pages.extend(pages)
        slots = rows.slots[rows.new_page_rows]
        np.add.at(self._page_room, slots, self._page_size)
        self._set_schedule_check(slots)
        sequences = self._at(slots)
        for group in range(self._num_groups):
            own = pages[group :: self._num_groups]
            for sequence, page in zip(sequences, own, strict=True):
                sequence.pages.tables[group].append(page)

    # Committing its results.

    def subtract_refused(
        self, rows: DecodeRows, tokens: NDArray[np.int32], held_rows: list[int]
    ) -> None:
        """Lower num_computed_tokens by the drafts that a step refused; tokens [rows, width].

        held_rows: rows that did not sample, whose sequences have started over
        """
        refused = rows.q_lens - np.count_nonzero(tokens != LAST, axis=1)
        refused[held_rows] = 0
        here = self._arrival_index[rows.slots] == rows.requests.arrival_index
        self._num_computed_tokens[rows.slots[here]] -= refused[here]

    def commit(
        self,
        requests: RequestColumns,
        known: Int64Array,
        tokens: NDArray[np.int32],
        irregular_rows: list[int],
    ) -> tuple[list[FullPage], list[int]]:
        """Append one token to each plain row; returns the pages filled and the other rows.

        known: tokens that the sequence of each row has before

        Not plain are `irregular_rows`, rows whose sequence has left or reaches its last token, and
        rows whose token is a stop id of any sequence.
        """
        slots = requests.slots
        # As unsigned numbers, negative tokens are large and count as invalid.
        irregular = self._is_stop_id[np.minimum(tokens.view(np.uint32), self._vocab_size)]
        if requests is not self._all_requests:
            irregular |= self._arrival_index[slots] != requests.arrival_index
        if irregular_rows:
            irregular[irregular_rows] = True
        at_check = known >= self._commit_check_at[slots]
        full: list[FullPage] = []
        if np.count_nonzero(at_check):
            irregular |= at_check & (known >= self._kv_limit[slots])
            fills_page = at_check & ~irregular
            full = self._flush_full_pages(slots[fills_page], known[fills_page])
        irregular_rows = irregular.nonzero()[0].tolist()
        if irregular_rows:
            plain = ~irregular
            slots, known, tokens = slots[plain], known[plain], tokens[plain]
        self._recent[slots, known % self._page_size] = tokens
        self.known[slots] = known + 1
        return full, irregular_rows

    def _flush_full_pages(self, slots: Int64Array, known: Int64Array) -> list[FullPage]:
        """The newest page of each is full; the next token will overwrite its first in `recent`."""
        pages, size = self._recent[slots], self._page_size
        content, page_bytes = pages.tobytes(), size * TOKEN_BYTES
        self._commit_check_at[slots] = np.minimum(known + size, self._kv_limit[slots])
        full: list[FullPage] = []
        columns = zip(self._at(slots), known.tolist(), pages.tolist(), strict=True)
        for row, (sequence, count, tokens) in enumerate(columns):
            missing = count - len(sequence.tokens)
            sequence.tokens += tokens[size - missing :]
            start = row * page_bytes
            page = content[start : start + page_bytes] if missing == size else b""
            full.append(FullPage(sequence, page))
        return full

    def check_integrity(self) -> None:
        """Assert that the arrays agree with the sequences."""
        assert len(set(self.slots.tolist())) == len(self.slots)
        for slot, sequence in zip(self.slots.tolist(), self.all(), strict=True):
            assert (sequence.slot, sequence.arrival_index) == (slot, self._arrival_index[slot])
            known = len(sequence.tokens)
            assert 0 <= self.known[slot] - known <= self._page_size
            for table in sequence.pages.tables:
                assert self._page_room[slot] == len(table) * self._page_size
            assert self.known[slot] - 1 <= self._num_computed_tokens[slot] <= self._page_room[slot]
        stop_ids = {token for sequence in self.all() for token in sequence.stop_ids}
        assert set(self._is_stop_id[:-1].nonzero()[0].tolist()) == stop_ids
