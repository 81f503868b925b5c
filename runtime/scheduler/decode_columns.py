"""Decoding: the sequences that have caught up, one token a step, in columns by slot.

What a step does with all of them is a few operations on whole columns.  Python that looks at one
after the other would be most of what a step of 256 rows costs the host: after the device's step of
some milliseconds nothing is left in the caches, and what is spread over many objects comes from
memory, one object after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.scheduler.batch import Int64Array, where
from runtime.scheduler.page_pool import TOKEN_BYTES
from runtime.scheduler.sequence import Sequence

NO_SEQUENCE = -1
NONE: Int64Array = np.zeros(0, dtype=np.int64)


class RowOwners(NamedTuple):
    """Whom rows are of, in columns: `order` names a sequence, and no other one ever."""

    slots: Int64Array
    ids: Int64Array
    clients: Int64Array
    order: Int64Array


class DecodeRows(NamedTuple):
    """The rows of a step that feed one token each."""

    owners: RowOwners
    starts: Int64Array
    new_page_rows: list[int]  # rows that get a page each
    new_pages: list[int]

    @property
    def slots(self) -> Int64Array:
        return self.owners.slots


class FullPage(NamedTuple):
    """A sequence whose newest tokens fill a page, and these tokens, if none was known before."""

    sequence: Sequence
    content: bytes


NO_ROWS = DecodeRows(RowOwners(NONE, NONE, NONE, NONE), NONE, [], [])


class DecodeColumns:
    """Columns, valid in the slots of `slots`.  What they say is said nowhere else.

    launched   positions of the KV cache that are written or queued to be
    kv_limit   where that ends, since nothing reads the last token
    page_room  positions that its pages hold
    due        the smaller one of these two: once it is reached there is something to do
    known      tokens known on the host
    recent     [slot, position % page_size]: the newest of them, at most a page
    look       with so many known, one more comes behind a full page or is the last one
    """

    def __init__(self, num_slots: int, vocab_size: int, page_size: int) -> None:
        def column() -> Int64Array:
            return np.zeros(num_slots, dtype=np.int64)

        self.slots: Int64Array = NONE  # in the order in which they entered
        self._members: RowOwners | None = None  # of all of them, until one enters or leaves
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._ids, self._clients, self._order = column(), column(), column() + NO_SEQUENCE
        self._num_computed_tokens, self._due = column(), column()
        self._kv_limit, self._page_room = column(), column()
        self._known, self._check_at = column(), column()
        self._recent = np.zeros((num_slots, page_size), dtype=np.int32)
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._num_ending: Counter[int] = Counter()  # sequences that end with a token
        # Whether anybody does; the last entry stands for what is no token.
        self._ends = np.zeros(vocab_size + 1, dtype=np.bool_)
        self._ends[vocab_size] = True

    def __len__(self) -> int:
        return len(self.slots)

    def all(self) -> list[Sequence]:
        return self._at(self.slots)

    def _at(self, slots: Int64Array) -> list[Sequence]:
        found: Iterable[Sequence | None] = map(self._sequences.__getitem__, slots.tolist())
        return [sequence for sequence in found if sequence is not None]

    def has(self, sequence: Sequence) -> bool:
        return sequence.slot >= 0 and self._sequences[sequence.slot] is sequence

    def add_sequence(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._members = None
        self.slots = np.append(self.slots, slot)
        self._sequences[slot] = sequence
        self._ids[slot], self._clients[slot] = sequence.request_id, sequence.request.client
        self._order[slot] = sequence.order
        self._num_computed_tokens[slot], self._kv_limit[slot] = (
            sequence.num_computed_tokens,
            sequence.limit - 1,
        )
        self._page_room[slot] = len(sequence.pages) * self._page_size
        self._due[slot] = min(self._kv_limit[slot], self._page_room[slot])
        self.sync_tokens(sequence)
        self._num_ending.update(sequence.stop_ids)
        self._ends[list(sequence.stop_ids)] = True

    def remove_sequence(self, sequence: Sequence) -> None:
        """It knows all its tokens again, and by `ahead` whether a row of it is under way."""
        self.flush_tokens(sequence)
        slot = sequence.slot
        samples = sequence.request.params.pooling is None
        sequence.unread_tokens = (
            int(self._num_computed_tokens[slot]) + 1 - len(sequence.tokens) if samples else 0
        )
        self._num_ending.subtract(sequence.stop_ids)
        for token in sequence.stop_ids:
            self._ends[token] = self._num_ending[token] > 0
        self._sequences[slot] = None
        self._order[slot] = NO_SEQUENCE
        self._members = None
        self.slots = self.slots[self.slots != slot]

    def flush_tokens(self, sequence: Sequence) -> None:
        """Add to its tokens those that it has only here."""
        missing = int(self._known[sequence.slot]) - len(sequence.tokens)
        if missing:
            first = len(sequence.tokens) % self._page_size
            sequence.tokens += self._recent[sequence.slot, first : first + missing].tolist()

    def sync_tokens(self, sequence: Sequence) -> None:
        """It got a token by itself."""
        slot, known = sequence.slot, len(sequence.tokens)
        page_end = -(-known // self._page_size) * self._page_size
        self._known[slot] = known
        self._check_at[slot] = min(sequence.limit - 1, page_end)

    # A step is made.

    def next_rows(self, most: int) -> tuple[RowOwners, Int64Array, list[int]]:
        """Whose next token is fed, from which positions; which of these rows need a page for it."""
        if self._members is None:
            self._members = self._choose(self.slots)
        owners = self._members
        starts = self._num_computed_tokens[owners.slots]
        due = where(starts >= self._due[owners.slots])
        if due or len(starts) > most:
            done = self._num_computed_tokens[self.slots] >= self._kv_limit[self.slots]
            if np.count_nonzero(done) or len(starts) > most:
                owners = self._choose(self.slots[~done][:most])
                starts = self._num_computed_tokens[owners.slots]
                due = where(starts >= self._due[owners.slots])
        return owners, starts, due

    def _choose(self, slots: Int64Array) -> RowOwners:
        return RowOwners(slots, self._ids[slots], self._clients[slots], self._order[slots])

    def launch(
        self, owners: RowOwners, starts: Int64Array, new_page_rows: list[int], pages: list[int]
    ) -> DecodeRows:
        """What next_rows() found is fed, with one of `pages` for each of the rows `crossing`."""
        self._num_computed_tokens[owners.slots] = starts + 1
        if pages:
            slots = owners.slots[new_page_rows]
            self._page_room[slots] += self._page_size
            self._due[slots] = np.minimum(self._page_room[slots], self._kv_limit[slots])
            for sequence, page in zip(self._at(slots), pages, strict=True):
                sequence.pages.append(page)
        return DecodeRows(owners, starts, new_page_rows, pages)

    # Its results come.

    def commit(
        self, rows: DecodeRows, tokens: NDArray[np.int32], irregular_rows: list[int]
    ) -> tuple[list[FullPage], list[int]]:
        """Every row gets its token, but for some that are returned.

        These are the `odd` ones, those of sequences that are no longer here or come to their limit,
        and where somebody ends with a token, all who got it.  Returned are full pages, too.
        """
        owners, known = rows.owners, rows.starts + 1
        slots = owners.slots
        # As unsigned numbers, negative ones are large.
        more = self._ends[np.minimum(tokens.view(np.uint32), self._vocab_size)]
        if owners is not self._members:
            more |= self._order[slots] != owners.order
        if irregular_rows:
            more[irregular_rows] = True
        at_check = known >= self._check_at[slots]
        full: list[FullPage] = []
        if np.count_nonzero(at_check):
            more |= at_check & (known >= self._kv_limit[slots])
            fills_page = at_check & ~more
            full = self._flush_full_pages(slots[fills_page], known[fills_page])
        others = where(more)
        if others:
            plain = ~more
            slots, known, tokens = slots[plain], known[plain], tokens[plain]
        self._recent[slots, known % self._page_size] = tokens
        self._known[slots] = known + 1
        return full, others

    def _flush_full_pages(self, slots: Int64Array, known: Int64Array) -> list[FullPage]:
        """A page of each is full, and its next token will be written over the first one."""
        pages, size = self._recent[slots], self._page_size
        content, page_bytes = pages.tobytes(), size * TOKEN_BYTES
        self._check_at[slots] = np.minimum(known + size, self._kv_limit[slots])
        full: list[FullPage] = []
        columns = zip(self._at(slots), known.tolist(), pages.tolist(), strict=True)
        for row, (sequence, count, tokens) in enumerate(columns):
            missing = count - len(sequence.tokens)
            sequence.tokens += tokens[size - missing :]
            mine = content[row * page_bytes : (row + 1) * page_bytes] if missing == size else b""
            full.append(FullPage(sequence, mine))
        return full

    def check_integrity(self) -> None:
        """Assert that the columns tell what the sequences do."""
        assert len(set(self.slots.tolist())) == len(self)
        for slot, sequence in zip(self.slots.tolist(), self.all(), strict=True):
            assert (sequence.slot, sequence.order) == (slot, self._order[slot])
            known = len(sequence.tokens)
            assert 0 <= self._known[slot] - known <= self._page_size
            assert self._page_room[slot] == len(sequence.pages) * self._page_size
            assert self._num_computed_tokens[slot] <= self._page_room[slot]
        ends = {token for sequence in self.all() for token in sequence.stop_ids}
        assert set(where(self._ends[:-1])) == ends
