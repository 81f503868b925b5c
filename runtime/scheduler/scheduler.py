"""Scheduler: what runs in the next step.

There is no prefill phase and no decode phase.  Each sequence has
`num_new_tokens = len(tokens) - num_computed_tokens` to compute, and a decode row one token more,
which is not known yet, and drafts after it.  A step takes all decode rows first, then chunks of
prefill as far as the token budget goes.  If decoding runs out of pages, it does without drafts;
then the sequence of lowest priority is preempted and recomputed later.

A row whose mask is late when its step samples is left out of that step, and its request is held:
it has no row until its mask arrives, and is preempted first if others need its pages or slot.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.config import MAX_SEQS
from runtime.scheduler.admission import Admission
from runtime.scheduler.batch import DRAFT, LAST, Batch, Int64Array
from runtime.scheduler.decode_columns import EMPTY, NO_DECODE_ROWS, DecodeRows
from runtime.scheduler.prefill import Prefill, PrefillRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.step_snapshots import StepSnapshots
from runtime.scheduler.step_time import StepLoad, StepTimes

# Constant columns of decode rows, of which every step takes a prefix; they are never written to.
ZEROS: Int64Array = np.zeros(MAX_SEQS, dtype=np.int64)
LASTS: Int64Array = np.full(MAX_SEQS, LAST, dtype=np.int64)
TRUES: NDArray[np.bool_] = np.ones(MAX_SEQS, dtype=np.bool_)


class SchedulerOutput(NamedTuple):
    """A scheduled step: its batch, the sequence of each row, and its load."""

    batch: Batch
    decoding: DecodeRows
    prefilling: list[Sequence]  # of the rows after the decode rows, in order
    load: StepLoad
    held_rows: list[int]  # rows that do not sample after all: their masks were late

    def without_sampling(self, rows: list[int]) -> SchedulerOutput:
        """This step, whose forward pass is queued already, with `rows` not sampling."""
        sample = self.batch.sample.copy()
        sample[rows] = False
        return self._replace(batch=structs.replace(self.batch, sample=sample), held_rows=rows)

    def live_rows(
        self, live: Mapping[int, Sequence], rows: Iterable[int]
    ) -> Iterator[tuple[int, Sequence]]:
        """Those of some decode rows and of all prefill rows whose requests are in `live` still."""
        requests = self.decoding.requests
        for row in rows:
            sequence = live.get(int(requests.ids[row]))
            if sequence is not None and sequence.arrival_index == requests.arrival_index[row]:
                yield row, sequence
        for row, sequence in enumerate(self.prefilling, self.batch.decode_rows):
            if sequence.finish is None:
                yield row, sequence

    def sampling_rows(
        self, live: Mapping[int, Sequence], request_ids: Container[int]
    ) -> list[tuple[int, int]]:
        """(row, request id) of the rows that sample for the live ones of `request_ids`."""
        ids = self.decoding.requests.ids.tolist()
        decoding = [row for row, id in enumerate(ids) if id in request_ids]
        return [
            (row, sequence.request_id)
            for row, sequence in self.live_rows(live, decoding)
            if sequence.request_id in request_ids and self.batch.sample[row]
        ]


class Scheduler:
    """Decides; the sequences, slots and pages belong to `requests`."""

    def __init__(self, requests: RequestTable) -> None:
        self.requests = requests
        self.admission = Admission(requests)
        self.times = StepTimes()
        self.prefill = Prefill(requests, self.admission, self.times)
        max_tokens = requests.resolved.max_tokens_per_row
        # In the order in which they are tried: fewer where pages are short.
        self._tokens_per_row = (max_tokens, 1) if max_tokens > 1 else (1,)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before a commit or a new request."""
        background_preempted = stuck = False
        while True:
            preempted = bool(self.requests.waiting.count) and self.admission.preempt_for_head()
            background_preempted = background_preempted or preempted
            decoding, prefill = self._step(background_preempted, stuck)
            if len(decoding.slots) or (prefill is not None and prefill.sequences):
                return scheduled_step(self.requests, decoding, prefill)
            lacks_pages = prefill is not None and prefill.lacks_pages
            stuck = lacks_pages and not self.requests.has_step_in_flight
            if stuck:  # prompts alone hold all pages, and none of them has enough for a token
                self._preempt_lowest()
            elif not preempted:
                return None

    def _step(
        self, background_preempted: bool, stuck: bool
    ) -> tuple[DecodeRows, PrefillRows | None]:
        """The rows of a step, perhaps none.

        background_preempted: a sequence just yielded, so background work is not admitted.
        stuck: one was preempted so that others can go on, so none is admitted.
        """
        requests = self.requests
        preemptions = requests.num_preemptions
        decoding, prefill = self._decode(), None
        num_rows = len(decoding.slots)
        waiting: list[Sequence] = []
        # A sequence preempted in this step may have a row in the step in flight: it is admitted
        # again after the commit of that row.
        if requests.waiting.count and preemptions == requests.num_preemptions and not stuck:
            waiting = self.admission.candidates(background_preempted)
        if waiting or requests.prefilling:
            prefill = self.prefill.schedule(decoding, waiting)
            num_rows = prefill.num_rows
        requests.num_steps += num_rows > 0
        requests.num_rows += num_rows
        return decoding, prefill

    def _decode(self) -> DecodeRows:
        """A row for each decoding sequence; preempts while there are too few pages."""
        requests = self.requests
        decoding = requests.decoding
        while len(decoding.slots):
            for tokens_per_row in self._tokens_per_row:
                rows = decoding.select_rows(requests.resolved.max_batched_tokens, tokens_per_row)
                count, kv_pages = len(rows.new_page_rows), requests.kv_pages
                if not count or count * kv_pages.num_groups <= requests.pool.num_available:
                    pages = kv_pages.allocate_for_rows(count) if count else []
                    decoding.schedule_rows(rows, pages)
                    return rows
            if requests.num_running == 1 and requests.has_step_in_flight:
                break  # its prompt's last chunk: the commit frees pages behind windows
            self._preempt_lowest()
        return NO_DECODE_ROWS

    def _preempt_lowest(self) -> None:
        requests = self.requests
        assert requests.num_running > 1, "one sequence alone always has enough pages"
        requests.preempt(requests.longest_held() or requests.lowest_priority())

    def hold_rows(self, scheduler_output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Leave rows that sample out of a step and hold their requests until they are resumed.

        The step's forward pass is queued, and the previous step has been committed.
        """
        decoding = [row for row in rows if row < scheduler_output.batch.decode_rows]
        for row, sequence in scheduler_output.live_rows(self.requests.live, decoding):
            if row in rows:
                self.requests.hold(sequence, int(scheduler_output.batch.starts[row]))
        return scheduler_output.without_sampling(rows)


def scheduled_step(
    requests: RequestTable, decoding: DecodeRows, prefill: PrefillRows | None
) -> SchedulerOutput:
    """The step of these rows, of which there is at least one."""
    rows = len(decoding.slots)
    num_new_pages, sample, tokens = ZEROS[:rows], TRUES[:rows], LASTS[:rows]
    if decoding.new_pages:
        num_new_pages = np.bincount(decoding.new_page_rows, minlength=rows)
    if decoding.num_tokens > rows:
        tokens = np.full(decoding.num_tokens, DRAFT, dtype=np.int64)
        tokens[np.cumsum(decoding.q_lens) - decoding.q_lens] = LAST
    new_pages = decoding.new_pages
    batch = Batch(
        slots=decoding.slots,
        starts=decoding.starts,
        q_lens=decoding.q_lens,
        tokens=tokens,
        num_new_pages=num_new_pages,
        new_pages=np.array(new_pages, dtype=np.int64) if new_pages else EMPTY,
        sample=sample,
        decode_rows=rows,
        new_rows=[],
    )
    load = StepLoad(decoding.num_tokens, 0, decoding.num_kv_tokens, 0.0)
    if prefill is not None:
        batch, load = prefill.join(batch, load)
    if requests.states.num_states:
        batch = _with_states(batch, requests, prefill.snapshots if prefill else None)
    if requests.images.dropped:
        batch = structs.replace(batch, images_dropped=requests.images.take_dropped())
    prefilling = [] if prefill is None else prefill.sequences
    return SchedulerOutput(batch, decoding, prefilling, load, [])


def _with_states(batch: Batch, requests: RequestTable, snapshots: StepSnapshots | None) -> Batch:
    """The batch with the recurrent states of its rows; snapshots: of its chunks of prefill."""
    saves, loads, pages = requests.snapshots.take_copies()
    state_slots, copies = requests.states.schedule(batch.slots)
    within: tuple[tuple[int, int, int], ...] = ()
    if snapshots is not None:
        within = tuple(snapshots.within)
        snapshots.save()
    return structs.replace(
        batch,
        state_slots=state_slots,
        state_snapshots=within,
        page_copies=pages,
        state_saves=saves,
        state_loads=loads,
        state_copies=copies,
    )
