"""Mistakes with requests: who waits, is held, gives way, and ends."""

from __future__ import annotations

from collections.abc import Callable

import runtime.scheduler.request_table
from runtime.engine.loop import Engine
from runtime.scheduler.admission import Admission
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import Scheduler, SchedulerOutput
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.waiting_queue import WaitingQueue


def preempted_loses_a_token(true: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: RequestTable, sequence: Sequence) -> None:
        true(self, sequence)
        if len(sequence.tokens) > sequence.prompt_len:
            sequence.tokens.pop()

    return preempt


def preempted_is_lost(true: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: RequestTable, sequence: Sequence) -> None:
        true(self, sequence)
        self.waiting.front()
        self.waiting.remove(sequence)

    return preempt


def abort_without_an_end(true: Callable[..., None]) -> Callable[..., None]:
    def abort(self: Engine, request_id: int) -> None:
        true(self, request_id)
        outputs = self.requests.outputs
        outputs[:] = [output for output in outputs if output.finish != "abort"]

    return abort


def back_at_once_after_making_way(
    true: Callable[..., list[Sequence]],
) -> Callable[..., list[Sequence]]:
    return lambda self, background_preempted: true(self, False)


def late_mask_not_waited_for(
    true: Callable[..., SchedulerOutput],
) -> Callable[..., SchedulerOutput]:
    return lambda self, scheduler_output, rows: scheduler_output


def left_out_row_committed(true: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    return lambda self, rows: true(self, rows)._replace(held_rows=[])


def held_slot_not_started_over(true: Callable[..., None]) -> Callable[..., None]:
    def hold(self: RequestTable, sequence: Sequence, start: int) -> None:
        true(self, sequence, start)
        sequence.needs_slot_init = False

    return hold


def held_token_not_fed_again(true: Callable[..., None]) -> Callable[..., None]:
    def hold(self: RequestTable, sequence: Sequence, start: int) -> None:
        true(self, sequence, start)
        sequence.num_computed_tokens += 1

    return hold


def held_for_ever(true: Callable[..., None]) -> Callable[..., None]:
    def resume_held(self: RequestTable, request_id: int) -> None:
        sequence = self.live.get(request_id)
        if sequence is not None and sequence.slot >= 0:
            true(self, request_id)

    return resume_held


def nothing_refused(true: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda request, resolved, vocab_size: None


def tokens_counted_when_they_leave(true: Callable[..., None]) -> Callable[..., None]:
    def remove(self: WaitingQueue, sequence: Sequence) -> None:
        sequence.num_waiting_tokens = len(sequence.tokens)
        true(self, sequence)

    return remove


def one_token_too_many(true: Callable[..., None]) -> Callable[..., None]:
    def push(self: WaitingQueue, sequence: Sequence) -> None:
        sequence.max_len += 1
        true(self, sequence)

    return push


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (RequestTable, "preempt", preempted_loses_a_token),
    (RequestTable, "preempt", preempted_is_lost),
    (Admission, "candidates", back_at_once_after_making_way),
    (Engine, "abort", abort_without_an_end),
    (Scheduler, "hold_rows", late_mask_not_waited_for),
    (RequestTable, "resume_held", held_for_ever),
    (SchedulerOutput, "without_sampling", left_out_row_committed),
    (RequestTable, "hold", held_slot_not_started_over),
    (RequestTable, "hold", held_token_not_fed_again),
    (runtime.scheduler.request_table, "validation_error", nothing_refused),
    (WaitingQueue, "push", one_token_too_many),
    (WaitingQueue, "remove", tokens_counted_when_they_leave),
]
