"""Mutations of the scheduler: each takes a function and returns one with a bug."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import structs

import runtime.scheduler.commit
import runtime.scheduler.kv_pages
import runtime.scheduler.request_table
import runtime.scheduler.sequence
from runtime.engine.loop import Engine
from runtime.messages import RequestOutput
from runtime.scheduler.admission import Admission
from runtime.scheduler.batch import LAST, ModelRunnerOutput
from runtime.scheduler.commit import Committer, TokenColumns
from runtime.scheduler.decode_columns import DecodeColumns, DecodeRows, RequestColumns
from runtime.scheduler.kv_pages import Claim, KVPages
from runtime.scheduler.page_pool import PagePool
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import BatchBuilder, Scheduler, SchedulerOutput
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.sequence_pages import SequencePages
from runtime.scheduler.states.snapshots import StateSnapshots
from runtime.scheduler.states.state_slots import StateSlots
from runtime.scheduler.states.step_snapshots import StepSnapshots
from runtime.scheduler.waiting_queue import WaitingQueue

TABLES: list[RequestTable] = []  # of the engine that runs


def released_twice(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: PagePool, pages: list[int], *, oldest_first: bool = False) -> None:
        true(self, pages)
        true(self, pages[:1])

    return release


def never_released(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, pages, oldest_first=False: true(self, pages[1:])


def shared_without_a_reference(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, pages: None


def remembered_after_it_was_taken(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def allocate(self: PagePool, count: int) -> list[int]:
        names = [dict(pages) for pages in self._page_of], dict(self._hash_of)
        pages = true(self, count)
        self._page_of, self._hash_of = names
        return pages

    return allocate


def salt_ignored(true: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda salt: true(b"")


def chain_without_parent(true: Callable[..., None]) -> Callable[..., None]:
    def extend(hashes: list[bytes], root: bytes, tokens: list[int], page_size: int) -> None:
        for first in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
            one: list[bytes] = []
            true(one, root, tokens[first : first + page_size], page_size)
            hashes += one

    return extend


def hit_of_a_page_not_yet_written(true: Callable[..., bool]) -> Callable[..., bool]:
    def add_prefill(self: BatchBuilder, sequence: Sequence, count: int) -> bool:
        result = true(self, sequence, count)
        table = TABLES[-1]
        hashes = sequence.hash_pages(table.resolved.page_size)
        for group, pages in enumerate(sequence.pages.tables):
            for page, page_hash in zip(pages, hashes, strict=False):
                if page >= 0:
                    table.pool.cache_page(page, page_hash, group)
        return result

    return add_prefill


def forgotten_new_page(true: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    def build(self: BatchBuilder, requests: RequestTable) -> SchedulerOutput:
        rows = self.decoding
        self.decoding = rows._replace(new_page_rows=rows.new_page_rows[1:])
        del rows.new_pages[:1]
        return true(self, requests)

    return build


def start_off_by_one(true: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    def build(self: BatchBuilder, requests: RequestTable) -> SchedulerOutput:
        self.starts = [start - (start > 4) for start in self.starts]
        self.decoding.starts[self.decoding.starts > 4] -= 1
        return true(self, requests)

    return build


def last_fed_stale_after_preemption(true: Callable[..., bool]) -> Callable[..., bool]:
    def add_prefill(self: BatchBuilder, sequence: Sequence, count: int) -> bool:
        samples = true(self, sequence, count)
        if sequence.preemptions and samples and sequence.tokens[sequence.prompt_len :]:
            self.tokens[-1] = LAST
        return samples

    return add_prefill


def slot_not_started_over(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence: None if sequence.preemptions else true(self, sequence)


def pages_off_by_one_crossing(true: Callable[..., None]) -> Callable[..., None]:
    def add_sequence(self: DecodeColumns, sequence: Sequence) -> None:
        true(self, sequence)
        self._page_room[sequence.slot] += 1
        self._schedule_check_at[sequence.slot] += 1

    return add_sequence


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


def abort_without_an_end(true: Callable[..., None]) -> Callable[..., None]:
    def abort(self: Engine, request_id: int) -> None:
        true(self, request_id)
        outputs = self.requests.outputs
        outputs[:] = [output for output in outputs if output.finish != "abort"]

    return abort


def whole_prompt_looked_up(true: Callable[..., Claim | None]) -> Callable[..., Claim | None]:
    def claim(self: KVPages, sequence: Sequence, spare: int) -> Claim | None:
        sequence.tokens.append(0)  # as if the page border did not matter
        found = true(self, sequence, spare)
        sequence.tokens.pop()
        return found

    return claim


def freed_a_position_too_early(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence, position: true(self, sequence, position + 2)


def never_freed_behind_a_window(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence, position: None


def windows_begin_a_position_late(true: Callable[..., int]) -> Callable[..., int]:
    return lambda position, window, page_size: true(position + 1, window, page_size)


def pages_of_another_group_hit(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, group, hashes: true(self, 0, hashes)


def tables_sent_in_the_wrong_order(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def unsent(self: SequencePages, count: int) -> list[int]:
        pages = true(self, count)
        return sorted(pages, reverse=True)

    return unsent


def back_at_once_after_making_way(
    true: Callable[..., list[Sequence]],
) -> Callable[..., list[Sequence]]:
    return lambda self, background_preempted: true(self, False)


def pages_never_reported(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, count: true(self, count)[:0]


def head_waits_for_ever(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: PagePool, pages: list[int], *, oldest_first: bool = False) -> None:
        true(self, pages)
        self.num_releases -= 1

    return release


def parts_of_prompts_always_usable(true: Callable[..., bool]) -> Callable[..., bool]:
    def note(
        self: Committer, sequence: Sequence, index: int, model_output: ModelRunnerOutput
    ) -> bool:
        return model_output.tokens[index] != LAST and true(self, sequence, index, model_output)

    return note


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


def min_tokens_forgotten(true: Callable[..., object]) -> Callable[..., object]:
    def end(sequence: Sequence, token: int) -> object:
        sequence.prompt_len += 1
        ended = true(sequence, token)
        sequence.prompt_len -= 1
        return ended

    return end


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


def means_without_their_prefix(true: Callable[..., bool]) -> property:
    return property(lambda self: self.request.params.prompt_logprobs is None)


# Where a row has several tokens.


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


def stop_in_the_last_token_alone(true: Callable[..., object]) -> Callable[..., object]:
    def append(self: Committer, sequence: Sequence, tokens: list[int], *rest: object) -> object:
        stop_ids, sequence.stop_ids = sequence.stop_ids, sequence.stop_ids & set(tokens[-1:])
        output = true(self, sequence, tokens, *rest)
        sequence.stop_ids = stop_ids
        return output

    return append


def tokens_after_the_end(true: Callable[..., RequestOutput]) -> Callable[..., RequestOutput]:
    def append(
        self: Committer, sequence: Sequence, tokens: list[int], *rest: object
    ) -> RequestOutput:
        return structs.replace(true(self, sequence, tokens, *rest), tokens=tokens)

    return append


def logprobs_of_the_first_alone(true: Callable[..., object]) -> Callable[..., object]:
    def append(
        self: Committer, sequence: Sequence, tokens: list[int], logprobs: list[object] | None
    ) -> object:
        return true(self, sequence, tokens, None if logprobs is None else logprobs[:1])

    return append


def tokens_in_reverse(true: Callable[..., object]) -> Callable[..., object]:
    def commit(self: Committer, *outputs: object) -> TokenColumns:
        columns = true(self, *outputs)
        assert isinstance(columns, TokenColumns)
        return TokenColumns(*[column[::-1] for column in columns])

    return commit


def plain_tokens_twice(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *row, first_column=0: true(self, *row[:4], 0)


def page_named_before_its_last_token_is_computed(true: Callable[..., None]) -> Callable[..., None]:
    def cache_pages(self: Committer, sequence: Sequence, start: int, end: int) -> None:
        room = len(sequence.pages.tables[0]) * self._page_size
        true(self, sequence, start, min(end + 1, len(sequence.tokens), max(room, end)))

    return cache_pages


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
    return lambda self, sequence, state, position, pool: true(
        self, sequence, state, position - 1, pool
    )


def snapshot_never_loaded(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, hit, state, sequence: None


def dropped_snapshot_lost(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, sequence: sequence.pending_snapshots.clear()


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (PagePool, "release", released_twice),
    (PagePool, "release", never_released),
    (PagePool, "release", head_waits_for_ever),
    (PagePool, "share", shared_without_a_reference),
    (PagePool, "allocate", remembered_after_it_was_taken),
    (runtime.scheduler.sequence, "extend_chain", chain_without_parent),
    (runtime.scheduler.sequence, "chain_root", salt_ignored),
    (Sequence, "may_use_prefix_cache", means_without_their_prefix),
    (BatchBuilder, "add_prefill", hit_of_a_page_not_yet_written),
    (BatchBuilder, "add_prefill", last_fed_stale_after_preemption),
    (SequencePages, "unsent", pages_never_reported),
    (SequencePages, "unsent", tables_sent_in_the_wrong_order),
    (BatchBuilder, "build", forgotten_new_page),
    (BatchBuilder, "build", start_off_by_one),
    (BatchBuilder, "init_slot", slot_not_started_over),
    (DecodeColumns, "add_sequence", pages_off_by_one_crossing),
    (DecodeColumns, "add_sequence", ends_of_others_alone),
    (DecodeColumns, "flush_tokens", newest_tokens_forgotten),
    (DecodeColumns, "select_rows", one_row_too_many),
    (DecodeColumns, "commit", ended_row_committed),
    (RequestTable, "preempt", preempted_loses_a_token),
    (RequestTable, "preempt", preempted_is_lost),
    (Admission, "candidates", back_at_once_after_making_way),
    (KVPages, "claim", whole_prompt_looked_up),
    (KVPages, "release_behind_window", freed_a_position_too_early),
    (KVPages, "release_behind_window", never_freed_behind_a_window),
    (runtime.scheduler.kv_pages, "first_seen_page", windows_begin_a_position_late),
    (PagePool, "found", pages_of_another_group_hit),
    (Engine, "abort", abort_without_an_end),
    (Committer, "_record_details", parts_of_prompts_always_usable),
    (Scheduler, "hold_rows", late_mask_not_waited_for),
    (RequestTable, "resume_held", held_for_ever),
    (SchedulerOutput, "without_sampling", left_out_row_committed),
    (RequestTable, "hold", void_tokens_of_a_prompt_in_the_state),
    (StateSnapshots, "save", snapshot_of_a_later_state),
    (StateSnapshots, "keep", snapshot_a_token_short),
    (StateSnapshots, "load", snapshot_never_loaded),
    (StateSnapshots, "drop", dropped_snapshot_lost),
    (StepSnapshots, "_add_within", snapshot_a_token_late),
    (StateSlots, "take_spare", spare_state_of_another),
    (StateSlots, "undo", state_of_a_void_row),
    (StateSlots, "release", state_never_released),
    (StateSlots, "schedule", state_not_copied),
    (RequestTable, "hold", held_slot_not_started_over),
    (RequestTable, "hold", held_token_not_fed_again),
    (runtime.scheduler.request_table, "validation_error", nothing_refused),
    (runtime.scheduler.commit, "_end", min_tokens_forgotten),
    (WaitingQueue, "push", one_token_too_many),
    (WaitingQueue, "remove", tokens_counted_when_they_leave),
    (DecodeColumns, "subtract_refused", refused_count_as_computed),
    (DecodeColumns, "subtract_refused", refused_of_a_row_that_started_over),
    (DecodeColumns, "select_rows", one_page_a_step),
    (DecodeColumns, "select_rows", pages_for_one_token_alone),
    (DecodeColumns, "select_rows", drafts_beyond_the_end),
    (DecodeColumns, "add_sequence", drafts_without_a_mask),
    (Committer, "commit", tokens_in_reverse),
    (Committer, "_commit_row", plain_tokens_twice),
    (Committer, "_append", stop_in_the_last_token_alone),
    (Committer, "_append", tokens_after_the_end),
    (Committer, "_append", logprobs_of_the_first_alone),
    (Committer, "_cache_pages", page_named_before_its_last_token_is_computed),
]
