"""Mistakes with the rows of a step: their positions, pages, tokens and drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import runtime.scheduler.scheduler
from runtime.scheduler.batch import LAST
from runtime.scheduler.decode_columns import DecodeColumns, DecodeRows, RequestColumns
from runtime.scheduler.prefill import PrefillRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import SchedulerOutput
from runtime.scheduler.sequence import Sequence


def forgotten_new_page(true: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    def scheduled_step(
        requests: RequestTable, decoding: DecodeRows, prefill: PrefillRows | None
    ) -> SchedulerOutput:
        forgets = decoding._replace(new_page_rows=decoding.new_page_rows[1:])
        del forgets.new_pages[:1]
        return true(requests, forgets, prefill)

    return scheduled_step


def start_off_by_one(true: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    def scheduled_step(
        requests: RequestTable, decoding: DecodeRows, prefill: PrefillRows | None
    ) -> SchedulerOutput:
        if prefill is not None:
            prefill.starts = [start - (start > 4) for start in prefill.starts]
        decoding.starts[decoding.starts > 4] -= 1
        return true(requests, decoding, prefill)

    return scheduled_step


def last_fed_stale_after_preemption(true: Callable[..., bool]) -> Callable[..., bool]:
    def add(self: PrefillRows, sequence: Sequence, count: int) -> bool:
        samples = true(self, sequence, count)
        if sequence.preemptions and samples and sequence.tokens[sequence.prompt_len :]:
            self.tokens[-1] = LAST
        return samples

    return add


def slot_not_started_over(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence: None if sequence.preemptions else true(self, sequence)


def pages_off_by_one_crossing(true: Callable[..., None]) -> Callable[..., None]:
    def add_sequence(self: DecodeColumns, sequence: Sequence) -> None:
        true(self, sequence)
        self._page_room[sequence.slot] += 1
        self._schedule_check_at[sequence.slot] += 1

    return add_sequence


def ended_row_committed(true: Callable[..., object]) -> Callable[..., object]:
    """A row under way for a sequence that has left its slot is taken for the next one's."""

    def commit(self: DecodeColumns, requests: RequestColumns, *rest: object) -> object:
        arrival_index = self._arrival_index[requests.slots]
        return true(self, requests._replace(arrival_index=arrival_index), *rest)

    return commit


def newest_tokens_forgotten(true: Callable[..., None]) -> Callable[..., None]:
    def flush_tokens(self: DecodeColumns, sequence: Sequence) -> None:
        if len(self.slots) == 1:
            true(self, sequence)

    return flush_tokens


def one_row_too_many(true: Callable[..., object]) -> Callable[..., object]:
    def select_rows(self: DecodeColumns, *limits: int) -> object:
        self._kv_limit += 1
        self._schedule_check_at += 1
        rows = true(self, *limits)
        self._kv_limit -= 1
        self._schedule_check_at -= 1
        return rows

    return select_rows


def ends_of_others_alone(true: Callable[..., None]) -> Callable[..., None]:
    def add_sequence(self: DecodeColumns, sequence: Sequence) -> None:
        true(self, sequence)
        if len(self.slots) == 1:
            self._is_stop_id[list(sequence.stop_ids)] = False

    return add_sequence


def refused_count_as_computed(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, tokens, held_rows: None


def refused_of_a_row_that_started_over(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, tokens, held_rows: true(self, rows, tokens, [])


def one_page_a_step(true: Callable[..., DecodeRows]) -> Callable[..., DecodeRows]:
    def select_rows(self: DecodeColumns, *limits: int) -> DecodeRows:
        rows = true(self, *limits)
        return rows._replace(new_page_rows=np.unique(rows.new_page_rows))

    return select_rows


def pages_for_one_token_alone(true: Callable[..., DecodeRows]) -> Callable[..., DecodeRows]:
    def select_rows(self: DecodeColumns, *limits: int) -> DecodeRows:
        rows = true(self, *limits)
        reached = rows.starts >= self._page_room[rows.slots]
        kept = [row for row in rows.new_page_rows.tolist() if reached[row]]
        return rows._replace(new_page_rows=np.array(kept, dtype=np.int64))

    return select_rows


def drafts_beyond_the_end(true: Callable[..., DecodeRows]) -> Callable[..., DecodeRows]:
    def select_rows(self: DecodeColumns, max_tokens: int, tokens_per_row: int) -> DecodeRows:
        rows = true(self, max_tokens, tokens_per_row)
        if len(rows.starts) == 1 and rows.num_tokens < tokens_per_row and max_tokens > 8:
            rows = rows._replace(q_lens=rows.q_lens + 1, num_tokens=rows.num_tokens + 1)
        return rows

    return select_rows


def drafts_without_a_mask(true: Callable[..., None]) -> Callable[..., None]:
    def add_sequence(self: DecodeColumns, sequence: Sequence) -> None:
        true(self, sequence)
        self._max_drafts[sequence.slot] = self._num_drafts

    return add_sequence


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (PrefillRows, "add", last_fed_stale_after_preemption),
    (runtime.scheduler.scheduler, "scheduled_step", forgotten_new_page),
    (runtime.scheduler.scheduler, "scheduled_step", start_off_by_one),
    (PrefillRows, "init_slot", slot_not_started_over),
    (DecodeColumns, "add_sequence", pages_off_by_one_crossing),
    (DecodeColumns, "add_sequence", ends_of_others_alone),
    (DecodeColumns, "flush_tokens", newest_tokens_forgotten),
    (DecodeColumns, "select_rows", one_row_too_many),
    (DecodeColumns, "commit", ended_row_committed),
    (DecodeColumns, "subtract_refused", refused_count_as_computed),
    (DecodeColumns, "subtract_refused", refused_of_a_row_that_started_over),
    (DecodeColumns, "select_rows", one_page_a_step),
    (DecodeColumns, "select_rows", pages_for_one_token_alone),
    (DecodeColumns, "select_rows", drafts_beyond_the_end),
    (DecodeColumns, "add_sequence", drafts_without_a_mask),
]
