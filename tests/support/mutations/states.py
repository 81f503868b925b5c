"""Mistakes with recurrent states and their snapshots."""

from __future__ import annotations

from collections.abc import Callable

from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.snapshots import StateSnapshots
from runtime.scheduler.states.state_slots import StateSlots
from runtime.scheduler.states.step_snapshots import StepSnapshots


def state_of_a_void_row(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence: None


def state_never_released(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: StateSlots, sequence: Sequence) -> None:
        free = list(self._free)
        true(self, sequence)
        self._free[:] = free

    return release


def state_not_copied(true: Callable[..., tuple[object, object]]) -> Callable[..., object]:
    return lambda self, slots: (true(self, slots)[0], ())


def void_tokens_of_a_prompt_in_the_state(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence, start: true(self, sequence, len(sequence.tokens) - 1)


def snapshot_of_a_later_state(true: Callable[..., None]) -> Callable[..., None]:
    """Copied when the next one is, and not before the next step."""

    def save(self: StateSnapshots, state: int, place: int) -> None:
        late = self.__dict__.setdefault("late", [])
        late.append((state, place))
        if len(late) > 1:
            true(self, *late.pop(0))

    return save


def snapshot_a_token_late(true: Callable[..., bool]) -> Callable[..., bool]:
    def add_within(self: StepSnapshots, *row: object) -> bool:
        added = true(self, *row)
        self.within = [(row, position + 1, state) for row, position, state in self.within]
        return added

    return add_within


def spare_state_of_another(true: Callable[..., int | None]) -> Callable[..., int | None]:
    def take_spare(self: StateSlots, needed: int) -> int | None:
        state = true(self, needed)
        if state is not None:
            self.give_back(state)
            state = 0
        return state

    return take_spare


def snapshot_a_token_short(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence, state, position, pool, step: true(
        self, sequence, state, position - 1, pool, step
    )


def snapshot_of_a_step_not_yet_read(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence, state, position, pool, step: true(
        self, sequence, state, position, pool, None
    )


def snapshot_never_loaded(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, hit, state, sequence: None


def dropped_snapshot_lost(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence: sequence.pending_snapshots.clear()


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (RequestTable, "hold", void_tokens_of_a_prompt_in_the_state),
    (StateSnapshots, "save", snapshot_of_a_later_state),
    (StateSnapshots, "keep", snapshot_a_token_short),
    (StateSnapshots, "keep", snapshot_of_a_step_not_yet_read),
    (StateSnapshots, "load", snapshot_never_loaded),
    (StateSnapshots, "drop", dropped_snapshot_lost),
    (StepSnapshots, "_add_within", snapshot_a_token_late),
    (StateSlots, "take_spare", spare_state_of_another),
    (StateSlots, "undo", state_of_a_void_row),
    (StateSlots, "release", state_never_released),
    (StateSlots, "schedule", state_not_copied),
]
