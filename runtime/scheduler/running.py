"""Running: the sequences that have a slot on the device."""

from __future__ import annotations

import math

from runtime.messages import BACKGROUND
from runtime.scheduler.decode_columns import DecodeColumns
from runtime.scheduler.sequence import Sequence


class Running:
    """Sequences that prefill and sequences that decode, each kind in the order of entry."""

    def __init__(self, num_slots: int, vocab_size: int, page_size: int) -> None:
        # By request id: tokens are left to schedule.  Some of them are held.
        self.prefilling: dict[int, Sequence] = {}
        self.decoding = DecodeColumns(num_slots, vocab_size, page_size)  # one token a step
        self.num_background = 0  # running sequences of priority BACKGROUND
        self._num_slots = num_slots
        self._steps = 0
        self._rows = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def full(self) -> bool:
        return not self._free_slots

    def all(self) -> list[Sequence]:
        return [*self.decoding.all(), *self.prefilling.values()]

    def add_sequence(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.needs_slot_init = True
        if sequence.steps_at_admission is None:
            sequence.steps_at_admission = (self._steps, self._rows)
        self.prefilling[sequence.request_id] = sequence
        self.num_background += sequence.request.priority >= BACKGROUND

    def start_decoding(self, sequence: Sequence) -> None:
        """All its known tokens are scheduled: from now on it decodes."""
        del self.prefilling[sequence.request_id]
        self.decoding.add_sequence(sequence)

    def hold(self, sequence: Sequence, now: float) -> None:
        """Hold a decoding sequence left out of a step: it keeps its slot and pages, without rows.

        The token that the device sampled for it is void, so its newest known token is computed
        again when it resumes.
        """
        self.decoding.remove_sequence(sequence)
        sequence.unread_tokens = 0
        sequence.num_computed_tokens = len(sequence.tokens) - 1
        sequence.needs_slot_init = True
        sequence.held_since = now
        self.prefilling[sequence.request_id] = sequence

    def longest_held(self, since: float = math.inf) -> Sequence | None:
        """The sequence that was held first, if it was held at `since` or before."""
        held = [
            (one.held_since, one.arrival_index, one)
            for one in self.prefilling.values()
            if one.held_since is not None and one.held_since <= since
        ]
        return min(held)[2] if held else None

    def remove_sequence(self, sequence: Sequence) -> None:
        if self.decoding.has(sequence):
            self.decoding.remove_sequence(sequence)
        else:
            del self.prefilling[sequence.request_id]
        self.num_background -= sequence.request.priority >= BACKGROUND
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def record_step(self, num_rows: int) -> None:
        self._steps += num_rows > 0
        self._rows += num_rows

    def mean_batch(self, sequence: Sequence) -> float:
        """Mean rows a step since the sequence was first admitted."""
        steps, rows = sequence.steps_at_admission or (self._steps, self._rows)
        return (self._rows - rows) / max(1, self._steps - steps)

    def lowest_priority(self) -> Sequence:
        return max(self.all(), key=lambda sequence: sequence.priority_key)

    def check_integrity(self) -> None:
        """Assert that each slot is free or has one sequence."""
        taken = [sequence.slot for sequence in self.all()]
        assert sorted(taken + self._free_slots) == list(range(self._num_slots))
        assert all(sequence.finish is None for sequence in self.all())
        background = [one for one in self.all() if one.request.priority >= BACKGROUND]
        assert len(background) == self.num_background
        self.decoding.check_integrity()
