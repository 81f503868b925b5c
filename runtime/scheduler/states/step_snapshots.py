"""StepSnapshots: the snapshots that are taken of the prompts of one step."""

from __future__ import annotations

from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.snapshots import StateSnapshots
from runtime.scheduler.states.state_slots import StateSlots

FEW_TOKENS = 8  # a row of no more is computed by a kernel that stores no states within the row


class StepSnapshots:
    """A row ends where a snapshot is due, or the device stores the state of that position, too:
    one a row, in a state that no sequence has, from which the next batch copies it."""

    def __init__(self, snapshots: StateSnapshots, states: StateSlots) -> None:
        self._snapshots, self._states = snapshots, states
        self.within: list[tuple[int, int, int]] = []  # Batch.state_snapshots
        self._at_ends: list[tuple[Sequence, int]] = []  # rows that end there, and the places
        self._spares: list[tuple[int, int]] = []  # states, and the places

    def most_tokens(self, sequence: Sequence, count: int, num_waiting: int) -> int:
        """Of the next `count` tokens of a sequence, those that a row can have; as add_row."""
        first, second = self._snapshots.next_positions(sequence)
        goes_on = count > FEW_TOKENS and self._states.has_spare(num_waiting)
        end = second if goes_on else first
        return min(count, end - sequence.num_computed_tokens) if end else count

    def add_row(self, sequence: Sequence, row: int, count: int, num_waiting: int) -> int:
        """Reserve the snapshots of a row of `count` tokens.  Returns how many of these it takes.

        num_waiting: sequences that may be admitted in this step still, which come first
        """
        due, start = self._snapshots.next_positions(sequence), sequence.num_computed_tokens
        end = start + count
        for index, position in enumerate(due):
            if not 0 < position < end:
                continue
            if index or not self._add_within(sequence, row, position, count, num_waiting):
                end = position
        if end in due:
            place = self._snapshots.reserve(sequence, end)
            if place is not None:
                self._at_ends.append((sequence, place))
        return end - start

    def _add_within(
        self, sequence: Sequence, row: int, position: int, count: int, num_waiting: int
    ) -> bool:
        """False if the row is to end at `position`."""
        state = self._states.take_spare(num_waiting) if count > FEW_TOKENS else None
        if state is None:
            return False
        place = self._snapshots.reserve(sequence, position)
        if place is None:
            self._states.give_back(state)
        else:
            self.within.append((row, position, state))
            self._spares.append((state, place))
        return True

    def save(self) -> None:
        """Let the next batch copy the states, which other rows may have from then on."""
        for sequence, place in self._at_ends:
            self._snapshots.save(self._states.of(sequence), place)
        for state, place in self._spares:
            self._snapshots.save(state, place)
            self._states.give_back(state)
