"""DecodeColumns: the sequences that decode, one token a step, as one array a field, by slot.

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

from runtime.scheduler.batch import Int64Array
from runtime.scheduler.page_pool import TOKEN_BYTES
from runtime.scheduler.sequence import Sequence

NO_SEQUENCE = -1
EMPTY: Int64Array = np.zeros(0, dtype=np.int64)


class RequestColumns(NamedTuple):
    """The request of each row, as arrays; an `arrival_index` is never used for two sequences."""

    slots: Int64Array
    ids: Int64Array
    clients: Int64Array
    arrival_index: Int64Array


class DecodeRows(NamedTuple):
    """The decode rows of a step: one token each."""

    requests: RequestColumns
    starts: Int64Array
    new_page_rows: list[int]  # rows that get one new page each, and
    new_pages: list[int]  # these pages

    @property
    def slots(self) -> Int64Array:
        return self.requests.slots


class FullPage(NamedTuple):
    """A sequence whose newest tokens fill a page; `content` are they if all of them are new."""

    sequence: Sequence
    content: bytes


NO_DECODE_ROWS = DecodeRows(RequestColumns(EMPTY, EMPTY, EMPTY, EMPTY), EMPTY, [], [])


class DecodeColumns:
    """Arrays indexed by slot, valid in `slots`.  They are the only record of these numbers.

    num_computed_tokens  positions of the KV cache that are written or queued to be
    kv_limit             its largest value: no position is written for the last token
    page_room            positions that the pages of the sequence hold
    schedule_check_at    min(kv_limit, page_room): at this num_computed_tokens the sequence needs
                         a page or is complete
    known                tokens known on the host
    recent               [slot, position % page_size]: the newest known tokens, at most a page
    commit_check_at      at this `known` the next token follows a full page or is the last one
    """

    def __init__(self, num_slots: int, vocab_size: int, page_size: int) -> None:
        def column() -> Int64Array:
            return np.zeros(num_slots, dtype=np.int64)

        self.slots: Int64Array = EMPTY  # in the order of entry
        self._all_requests: RequestColumns | None = None  # cached until a sequence enters or leaves
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._ids, self._clients, self._arrival_index = column(), column(), column() + NO_SEQUENCE
        self._num_computed_tokens, self._schedule_check_at = column(), column()
        self._kv_limit, self._page_room = column(), column()
        self._known, self._commit_check_at = column(), column()
        self._recent = np.zeros((num_slots, page_size), dtype=np.int32)
        self._page_size = page_size
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
        self._num_computed_tokens[slot], self._kv_limit[slot] = (
            sequence.num_computed_tokens,
            sequence.max_len - 1,
        )
        self._page_room[slot] = len(sequence.pages) * self._page_size
        self._schedule_check_at[slot] = min(self._kv_limit[slot], self._page_room[slot])
        self.sync_tokens(sequence)
        self._stop_id_counts.update(sequence.stop_ids)
        self._is_stop_id[list(sequence.stop_ids)] = True

    def remove_sequence(self, sequence: Sequence) -> None:
        """Flush its tokens; its `unread_tokens` count a row of it that is in flight."""
        self.flush_tokens(sequence)
        slot = sequence.slot
        samples = sequence.request.params.pooling is None
        sequence.unread_tokens = (
            int(self._num_computed_tokens[slot]) + 1 - len(sequence.tokens) if samples else 0
        )
        self._stop_id_counts.subtract(sequence.stop_ids)
        for token in sequence.stop_ids:
            self._is_stop_id[token] = self._stop_id_counts[token] > 0
        self._sequences[slot] = None
        self._arrival_index[slot] = NO_SEQUENCE
        self._all_requests = None
        self.slots = self.slots[self.slots != slot]

    def flush_tokens(self, sequence: Sequence) -> None:
        """Append to its `tokens` those that are only in the arrays."""
        missing = int(self._known[sequence.slot]) - len(sequence.tokens)
        if missing:
            first = len(sequence.tokens) % self._page_size
            sequence.tokens += self._recent[sequence.slot, first : first + missing].tolist()

    def sync_tokens(self, sequence: Sequence) -> None:
        """Update the arrays after a token was appended to `sequence.tokens`."""
        slot, known = sequence.slot, len(sequence.tokens)
        page_end = -(-known // self._page_size) * self._page_size
        self._known[slot] = known
        self._commit_check_at[slot] = min(sequence.max_len - 1, page_end)

    # Scheduling a step.

    def select_rows(self, max_rows: int) -> tuple[RequestColumns, Int64Array, list[int]]:
        """The requests of the next step's rows, their start positions, and which need a page."""
        if self._all_requests is None:
            self._all_requests = self._columns_of(self.slots)
        requests = self._all_requests
        starts = self._num_computed_tokens[requests.slots]
        new_page_rows = true_indices(starts >= self._schedule_check_at[requests.slots])
        if new_page_rows or len(starts) > max_rows:
            done = self._num_computed_tokens[self.slots] >= self._kv_limit[self.slots]
            if np.count_nonzero(done) or len(starts) > max_rows:
                requests = self._columns_of(self.slots[~done][:max_rows])
                starts = self._num_computed_tokens[requests.slots]
                new_page_rows = true_indices(starts >= self._schedule_check_at[requests.slots])
        return requests, starts, new_page_rows

    def _columns_of(self, slots: Int64Array) -> RequestColumns:
        return RequestColumns(
            slots, self._ids[slots], self._clients[slots], self._arrival_index[slots]
        )

    def schedule_rows(
        self,
        requests: RequestColumns,
        starts: Int64Array,
        new_page_rows: list[int],
        pages: list[int],
    ) -> DecodeRows:
        """Schedule the rows of select_rows(), with one of `pages` for each of `new_page_rows`."""
        self._num_computed_tokens[requests.slots] = starts + 1
        if pages:
            slots = requests.slots[new_page_rows]
            self._page_room[slots] += self._page_size
            self._schedule_check_at[slots] = np.minimum(
                self._page_room[slots], self._kv_limit[slots]
            )
            for sequence, page in zip(self._at(slots), pages, strict=True):
                sequence.pages.append(page)
        return DecodeRows(requests, starts, new_page_rows, pages)

    # Committing its results.

    def commit(
        self, rows: DecodeRows, tokens: NDArray[np.int32], irregular_rows: list[int]
    ) -> tuple[list[FullPage], list[int]]:
        """Append the token of every plain row; returns the pages filled and the other rows.

        Not plain are `irregular_rows`, rows whose sequence has left or reaches its last token, and
        rows whose token is a stop id of any sequence.
        """
        requests, known = rows.requests, rows.starts + 1
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
        irregular_rows = true_indices(irregular)
        if irregular_rows:
            plain = ~irregular
            slots, known, tokens = slots[plain], known[plain], tokens[plain]
        self._recent[slots, known % self._page_size] = tokens
        self._known[slots] = known + 1
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
            assert 0 <= self._known[slot] - known <= self._page_size
            assert self._page_room[slot] == len(sequence.pages) * self._page_size
            assert self._num_computed_tokens[slot] <= self._page_room[slot]
        stop_ids = {token for sequence in self.all() for token in sequence.stop_ids}
        assert set(true_indices(self._is_stop_id[:-1])) == stop_ids


def true_indices(mask: NDArray[np.bool_]) -> list[int]:
    """The indices at which a one-dimensional mask is true."""
    return mask.nonzero()[0].tolist()
