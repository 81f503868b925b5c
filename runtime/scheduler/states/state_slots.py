"""StateSlots: which recurrent state each running sequence has, in models whose layers keep some.

A state changes in place, so a row that has run cannot run again.  One sort of row does: that whose
mask is late is left out of its step, and computes its tokens again when the mask is there.  So
a sequence with a grammar has two states in turn: a row first copies the state that it continues.
"""

from __future__ import annotations

import numpy as np

from runtime.scheduler.batch import Int64Array
from runtime.scheduler.sequence import Sequence

NONE = -1
MAX_STATES_OF_A_SEQUENCE = 2
Copies = tuple[tuple[int, int], ...]


class StateSlots:
    """Of a model without states, with num_states 0, every method does nothing."""

    def __init__(self, num_slots: int, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states - 1, -1, -1))
        # By slot: what its next row continues, and the other state of a sequence with two.
        self._current: Int64Array = np.full(num_slots, NONE, dtype=np.int64)
        self._other: Int64Array = np.full(num_slots, NONE, dtype=np.int64)
        self._num_with_two = 0

    @property
    def num_used(self) -> int:
        return self.num_states - len(self._free)

    def room(self, most: int) -> int:
        """How many more sequences find a state, up to `most`."""
        return min(most, len(self._free)) if self.num_states else most

    def has_room(self, sequence: Sequence) -> bool:
        return not self.num_states or len(self._free) >= _needed(sequence)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence that has just got its slot its states; their content is junk."""
        if not self.num_states:
            return
        self._current[sequence.slot] = self._free.pop()
        if _needed(sequence) == 2:
            self._other[sequence.slot] = self._free.pop()
            self._num_with_two += 1

    def release(self, sequence: Sequence) -> None:
        """Free the states of a sequence that is about to lose its slot."""
        if not self.num_states:
            return
        slot = sequence.slot
        self._free.append(int(self._current[slot]))
        if self._other[slot] != NONE:
            self._free.append(int(self._other[slot]))
            self._num_with_two -= 1
        self._current[slot] = self._other[slot] = NONE

    def schedule(self, slots: Int64Array) -> tuple[Int64Array, Copies]:
        """The states that rows of these slots change, and the copies (from, to) made before."""
        if not self._num_with_two:
            return self._current[slots], ()
        two = slots[self._other[slots] != NONE]
        before, after = self._current[two], self._other[two]
        self._current[two], self._other[two] = after, before
        return self._current[slots], tuple(zip(before.tolist(), after.tolist(), strict=True))

    def of(self, sequence: Sequence) -> int:
        """The state after the last row that is scheduled of a sequence."""
        return int(self._current[sequence.slot])

    def take_spare(self, needed: int) -> int | None:
        """A state of no sequence, until `give_back`; None if `needed` sequences could lack it."""
        return self._free.pop() if self.has_spare(needed) else None

    def has_spare(self, needed: int) -> bool:
        return len(self._free) > MAX_STATES_OF_A_SEQUENCE * needed

    def give_back(self, state: int) -> None:
        self._free.append(state)

    def undo(self, sequence: Sequence) -> None:
        """The last row of the sequence is void: it continues what that row continued."""
        if self.num_states:
            slot = sequence.slot
            assert self._other[slot] != NONE, "only a sequence with a grammar is held"
            self._current[slot], self._other[slot] = self._other[slot], self._current[slot]

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that each running sequence has its states, and the others are free."""
        if self.num_states:
            slots = [sequence.slot for sequence in running]
            both = [*self._current[slots].tolist(), *self._other[slots].tolist()]
            held = [state for state in both if state != NONE]
            assert sorted(held + self._free) == list(range(self.num_states))
            assert len(held) == sum(map(_needed, running))


def _needed(sequence: Sequence) -> int:
    return 2 if sequence.request.params.grammar else 1
