"""Decoding: the sequences that have caught up, one token a step, in columns by slot.

What a step does with all of them is a few operations on whole columns.  Python that looks at one
after the other would be most of what a step of 256 rows costs the host: after the device's step of
some milliseconds nothing is left in the caches, and what is spread over many objects comes from
memory, one object after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Ints, where
from runtime.sequence import Sequence

NOBODY = -1
NONE: Ints = np.zeros(0, dtype=np.int64)


class Members(NamedTuple):
    """Whom rows are of, in columns: `order` names a sequence, and no other one ever."""

    slots: Ints
    ids: Ints
    clients: Ints
    order: Ints


class DecodeRows(NamedTuple):
    """The rows of a step that feed one token each."""

    members: Members
    starts: Ints
    new_pages: Mapping[int, int]  # by row

    @property
    def slots(self) -> Ints:
        return self.members.slots


NO_ROWS = DecodeRows(Members(NONE, NONE, NONE, NONE), NONE, {})


class Decoding:
    """Columns, valid in the slots of `slots`.  What they say is said nowhere else.

    launched   positions of the KV cache that are written or queued to be
    kv_limit   where that ends, since nothing reads the last token: a token that is known behind
               it ends the sequence
    page_room  positions that its pages hold
    due        the smaller one of these two: once it is reached there is something to do
    known      tokens known on the host
    recent     [slot, position % page_size]: its newest tokens, of at most one page
    """

    def __init__(self, num_slots: int, vocab_size: int, page_size: int) -> None:
        def column() -> Ints:
            return np.zeros(num_slots, dtype=np.int64)

        self.slots: Ints = NONE  # in the order in which they entered
        self._members: Members | None = None  # of all of them, until one enters or leaves
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._ids, self._clients, self._order = column(), column(), column() + NOBODY
        self._launched, self._known, self._due = column(), column(), column()
        self._kv_limit, self._page_room = column(), column()
        self._recent = np.zeros((num_slots, page_size), dtype=np.int32)
        self._page_size = page_size
        self._vocab_size = vocab_size
        # How many sequences end with a token; the last entry stands for what is no token.
        self._ends = np.zeros(vocab_size + 1, dtype=np.int32)
        self._ends[vocab_size] = 1

    def __len__(self) -> int:
        return len(self.slots)

    def all(self) -> list[Sequence]:
        return self._at(self.slots)

    def _at(self, slots: Ints) -> list[Sequence]:
        found: Iterable[Sequence | None] = map(self._sequences.__getitem__, slots.tolist())
        return [sequence for sequence in found if sequence is not None]

    def has(self, sequence: Sequence) -> bool:
        return sequence.slot >= 0 and self._sequences[sequence.slot] is sequence

    def enter(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._members = None
        self.slots = np.append(self.slots, slot)
        self._sequences[slot] = sequence
        self._ids[slot], self._clients[slot] = sequence.request_id, sequence.request.client
        self._order[slot] = sequence.order
        self._launched[slot], self._kv_limit[slot] = sequence.launched, sequence.limit - 1
        self._page_room[slot] = len(sequence.pages) * self._page_size
        self._due[slot] = min(self._kv_limit[slot], self._page_room[slot])
        self.note_tokens(sequence)
        self._ends[list(sequence.stop_ids)] += 1

    def leave(self, sequence: Sequence) -> None:
        """It knows all its tokens again, and by `ahead` whether a row of it is under way."""
        self.settle(sequence)
        slot = sequence.slot
        samples = sequence.request.params.pooling is None
        sequence.ahead = int(self._launched[slot] + 1 - self._known[slot]) if samples else 0
        self._ends[list(sequence.stop_ids)] -= 1
        self._sequences[slot] = None
        self._order[slot] = NOBODY
        self._members = None
        self.slots = self.slots[self.slots != slot]

    def settle(self, sequence: Sequence) -> None:
        """Add to its tokens those that it has only here."""
        first, known = len(sequence.tokens), int(self._known[sequence.slot])
        start = first % self._page_size
        sequence.tokens += self._recent[sequence.slot, start : start + known - first].tolist()

    def note_tokens(self, sequence: Sequence) -> None:
        """It got a token by itself."""
        slot, known = sequence.slot, len(sequence.tokens)
        self._known[slot] = known
        self._recent[slot, (known - 1) % self._page_size] = sequence.tokens[-1]

    # A step is made.

    def next_rows(self, most: int) -> tuple[Members, Ints, list[int]]:
        """Whose next token is fed, from which positions; which of these rows need a page for it."""
        if self._members is None:
            self._members = self._choose(self.slots)
        members = self._members
        starts = self._launched[members.slots]
        due = where(starts >= self._due[members.slots])
        if due or len(starts) > most:
            done = self._launched[self.slots] >= self._kv_limit[self.slots]
            if np.count_nonzero(done) or len(starts) > most:
                members = self._choose(self.slots[~done][:most])
                starts = self._launched[members.slots]
                due = where(starts >= self._due[members.slots])
        return members, starts, due

    def _choose(self, slots: Ints) -> Members:
        return Members(slots, self._ids[slots], self._clients[slots], self._order[slots])

    def launch(
        self, members: Members, starts: Ints, crossing: list[int], pages: list[int]
    ) -> DecodeRows:
        """What next_rows() found is fed, with one of `pages` for each of the rows `crossing`."""
        self._launched[members.slots] = starts + 1
        new_pages = dict(zip(crossing, pages, strict=True))
        if new_pages:
            slots = members.slots[crossing]
            self._page_room[slots] += self._page_size
            self._due[slots] = np.minimum(self._page_room[slots], self._kv_limit[slots])
            for sequence, page in zip(self._at(slots), pages, strict=True):
                sequence.pages.append(page)
        return DecodeRows(members, starts, new_pages)

    # Its results come.

    def commit(
        self, rows: Members, tokens: NDArray[np.int32], odd: list[int]
    ) -> tuple[list[Sequence], list[int]]:
        """A token for each row, but for those that there is more to say of: of `odd` ones, and of
        those that end with it, or have ended before.

        Returns sequences whose last full page is written now, and the rows left to the caller.
        Where somebody ends with a token, all who got it are left.
        """
        slots = rows.slots
        known = self._known[slots]
        # As unsigned numbers, negative ones are large.
        ends = self._ends[np.minimum(tokens.view(np.uint32), self._vocab_size)]
        more = (self._order[slots] != rows.order) | (known >= self._kv_limit[slots]) | (ends > 0)
        more[odd] = True
        others = where(more)
        if others:
            plain = ~more
            slots, known, tokens = slots[plain], known[plain], tokens[plain]
        places = known % self._page_size
        full = self._at(slots[places == 0])
        for sequence in full:
            self.settle(sequence)
        self._recent[slots, places] = tokens
        self._known[slots] = known + 1
        return full, others

    def check_integrity(self) -> None:
        """Assert that the columns tell what the sequences do."""
        assert len(set(self.slots.tolist())) == len(self)
        for slot, sequence in zip(self.slots.tolist(), self.all(), strict=True):
            assert (sequence.slot, sequence.order) == (slot, self._order[slot])
            assert 0 <= self._known[slot] - len(sequence.tokens) <= self._page_size
            assert self._page_room[slot] == len(sequence.pages) * self._page_size
            assert self._launched[slot] <= self._page_room[slot]
        ends = sum(len(sequence.stop_ids) for sequence in self.all())
        assert self._ends.sum() == ends + 1
