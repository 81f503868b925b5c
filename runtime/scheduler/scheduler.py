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
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.config import MAX_SEQS
from runtime.scheduler.admission import Admission
from runtime.scheduler.batch import DRAFT, LAST, Batch, Int64Array, NewRow, RowImage
from runtime.scheduler.chunked_prefill import ChunkBudget, PrefillLoad
from runtime.scheduler.decode_columns import EMPTY, NO_DECODE_ROWS, DecodeRows
from runtime.scheduler.images.encoder_schedule import EncoderSchedule, EncoderWork
from runtime.scheduler.images.features import unread_images
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
        self.chunks = ChunkBudget(requests.resolved, self.times, requests.mix)
        self.encoder = EncoderSchedule(requests, self.times)
        max_tokens = requests.resolved.max_tokens_per_row
        # In the order in which they are tried: fewer where pages are short.
        self._tokens_per_row = (max_tokens, 1) if max_tokens > 1 else (1,)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before a commit or a new request."""
        background_preempted = stuck = False
        while True:
            preempted = bool(self.requests.waiting.count) and self.admission.preempt_for_head()
            background_preempted = background_preempted or preempted
            builder = self._step(background_preempted, stuck)
            if builder.num_rows:
                return builder.build(self.requests)
            stuck = builder.lacks_pages and not self.requests.has_step_in_flight
            if stuck:  # prompts alone hold all pages, and none of them has enough for a token
                self._preempt_lowest()
            elif not preempted:
                return None

    def _step(self, background_preempted: bool, stuck: bool) -> BatchBuilder:
        """`background_preempted`: a sequence just yielded, so background work is not admitted.

        stuck: one was preempted so that others can go on, so none is admitted.
        """
        requests = self.requests
        preemptions = requests.num_preemptions
        builder = BatchBuilder(self._decode(), requests.resolved.page_size)
        waiting: list[Sequence] = []
        # A sequence preempted in this step may have a row in the step in flight: it is admitted
        # again after the commit of that row.
        if requests.waiting.count and preemptions == requests.num_preemptions and not stuck:
            waiting = self.admission.candidates(background_preempted)
        if waiting or requests.prefilling:
            if requests.states.num_states:
                builder.snapshots = StepSnapshots(requests.snapshots, requests.states)
            self._schedule_prefills(builder, waiting)
        requests.num_steps += builder.num_rows > 0
        requests.num_rows += builder.num_rows
        return builder

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

    def _schedule_prefills(self, builder: BatchBuilder, waiting: list[Sequence]) -> None:
        """Add chunks of prefill up to the token budget; admits some of `waiting`.

        Within a priority those with far fewer tokens left come first, so that they do not wait for
        a long prompt; the first by priority key gets at least half of the tokens, so that a long
        prompt progresses, too.
        """
        prefilling = [one for one in self.requests.prefilling.values() if one.held_since is None]
        if not prefilling and not waiting:
            return
        budget = self._prefill_budget(builder, prefilling, waiting)
        if budget <= 0:
            return
        first = min(chain(prefilling, waiting[:1]), key=lambda one: one.priority_key)
        # Admitted before others can take the pages that it needs.
        if first.slot < 0:
            self.admission.try_admit(first)
        now = self.requests.clock()
        first, reserved = self._reserved(builder, first, budget)
        room, ordered = budget, sorted(chain(prefilling, waiting), key=_shortest_first)
        for sequence in ordered:
            reserved = 0 if sequence is first else reserved
            if room <= reserved:
                continue
            if sequence.slot >= 0 or self.admission.try_admit(sequence):
                room -= self._add_chunk(builder, sequence, room - reserved, now)
        for alone in (False, True):
            if not builder.waits_for_encoder:
                break
            self._add_any_chunk(builder, [first, *ordered], budget, now, alone=alone)

    def _add_any_chunk(
        self,
        builder: BatchBuilder,
        sequences: list[Sequence],
        room: int,
        now: float,
        *,
        alone: bool,
    ) -> None:
        """Let a sequence that has a slot progress, where prompts with images wait for each other.

        alone: its images are encoded whatever others wait for
        """
        for sequence in sequences:
            if sequence.slot >= 0 and sequence.num_new_tokens and builder.waits_for_encoder:
                self._add_chunk(builder, sequence, room, now, alone=alone)

    def _add_chunk(
        self,
        builder: BatchBuilder,
        sequence: Sequence,
        room: int,
        now: float,
        *,
        alone: bool = False,
    ) -> int:
        """Add a row of at most `room` tokens of a sequence that has a slot; less what the encoder
        costs.  -> what both take of the room"""
        count, cost = min(sequence.num_new_tokens, room), 0
        snapshots, num_waiting = builder.snapshots, self._num_admissible
        if snapshots is not None:
            count = snapshots.most_tokens(sequence, count, num_waiting)
        spare = self.requests.pages_soon
        count = self.requests.kv_pages.extend_for_chunk(sequence, count, spare)
        if count <= 0:
            builder.lacks_pages = True
            return 0
        if sequence.request.images:
            count, cost = self._encode(builder, sequence, count, room, alone=alone)
            if not count:
                return cost
        if snapshots is not None:
            count = snapshots.add_row(sequence, builder.num_rows, count, num_waiting)
        if count > 1 or not sequence.first_output_sent:  # not when it resumes after a mask
            sequence.note_event(now, count)
        if builder.add_prefill(sequence, count):
            self.requests.start_decoding(sequence)
        return cost + count

    @property
    def _num_admissible(self) -> int:
        return min(self.requests.waiting.count, self.requests.num_free_slots)

    def _reserved(
        self, builder: BatchBuilder, first: Sequence, budget: int
    ) -> tuple[Sequence, int]:
        """Which sequence gets tokens of the budget before all others, and how many: half of them,
        or more where the encoder cannot do less for its next one."""
        if first.slot < 0:
            return first, 0
        if builder.encoder is None:
            return first, min(first.num_new_tokens, budget - budget // 2)
        limits = builder.encoder.limits
        if not first.request.images:
            # As much as leaves a stage of the image that is begun to others.
            most = max(budget - self.encoder.stage_for_others(first, limits), 0)
            return first, min(first.num_new_tokens, budget - budget // 2, most)
        first = self.encoder.waits_for(first) or first
        left = first.num_new_tokens + self.encoder.tokens_left([first])
        least = self.encoder.first_cost(first, limits)
        return first, min(left, max(budget - budget // 2, least), budget)

    def _encode(
        self,
        builder: BatchBuilder,
        sequence: Sequence,
        count: int,
        room: int,
        *,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Let the encoder run for the next `count` tokens.  -> how many of them the step can have,
        and what the encoder costs, of `room` tokens for both."""
        work = builder.encoder
        assert work is not None, "a request with images was taken for a model that reads none"
        nothing_else = not builder.prefilling and not work.stages
        count, cost = self.encoder.encode(
            work, sequence, count, room, must_run=nothing_else or alone, alone=alone
        )
        sequence.num_encoder_tokens += cost
        return count, cost

    def _prefill_budget(
        self, builder: BatchBuilder, prefilling: list[Sequence], waiting: list[Sequence]
    ) -> int:
        decoding = self.requests.decoding
        num_admissible, waiting_tokens = self.admission.admissible(waiting)
        tokens = waiting_tokens
        for sequence in prefilling:
            tokens += sequence.num_new_tokens
        load = PrefillLoad(
            len(prefilling) + num_admissible,
            tokens,
            max([sequence.num_computed_tokens for sequence in prefilling], default=0),
            max([sequence.num_new_tokens for sequence in prefilling], default=0),
            int(np.add.reduce(decoding.known[decoding.slots])),
            sum(max(one.num_computed_tokens - one.num_cached_tokens, 0) for one in prefilling),
        )
        if self.requests.resolved.encoder_stages:
            left = self.encoder.tokens_left(prefilling)
            if any(one.request.images for one in waiting):
                left += int(waiting_tokens * self.requests.mix.encoder_share)
            has_images = any(one.request.images and unread_images(one) for one in prefilling)
            load = load._replace(encoder_tokens=left, has_images=has_images)
            limits = self.chunks.encoder_limits(builder.decoding.num_tokens, load)
            builder.encoder = EncoderWork(limits)
        return self.chunks.tokens(builder.decoding.num_tokens, builder.kv_tokens, load)

    def hold_rows(self, scheduler_output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Leave rows that sample out of a step and hold their requests until they are resumed.

        The step's forward pass is queued, and the previous step has been committed.
        """
        decoding = [row for row in rows if row < scheduler_output.batch.decode_rows]
        for row, sequence in scheduler_output.live_rows(self.requests.live, decoding):
            if row in rows:
                self.requests.hold(sequence, int(scheduler_output.batch.starts[row]))
        return scheduler_output.without_sampling(rows)


def _shortest_first(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then by tokens left; within a factor of four, by arrival."""
    size = sequence.num_new_tokens.bit_length() // 2
    return (sequence.request.priority, size, sequence.arrival_index)


class BatchBuilder:
    """The rows of one step: all decode rows at once, then chunks of prefill one by one."""

    def __init__(self, decoding: DecodeRows, page_size: int) -> None:
        self.decoding, self._page_size = decoding, page_size
        self.snapshots: StepSnapshots | None = None  # of prompts, in models with recurrent states
        self.decode_rows = len(decoding.slots)
        self.prefilling: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.q_lens: list[int] = []
        self.tokens: list[int] = []
        self.num_new_pages: list[int] = []
        self.new_pages: list[int] = []
        self.sample: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.lacks_pages = False  # a chunk was left out for which there was no page
        self.kv_tokens = int(np.add.reduce(decoding.starts))  # read by the decode rows
        self.pairs = 0.0  # query-key pairs of the prefill tokens
        self.encoder: EncoderWork | None = None  # of a step that may have prompts with images
        self.has_images = 0

    @property
    def num_rows(self) -> int:
        return self.decode_rows + len(self.prefilling)

    @property
    def waits_for_encoder(self) -> bool:
        """Whether prompts get nothing of the step, or stages of the encoder would be its only work:
        a step without rows does not run."""
        work = self.encoder
        return not (work is None or self.prefilling or (work.stages and self.decode_rows))

    def add_prefill(self, sequence: Sequence, count: int) -> bool:
        """Add a row of `count` known tokens.  True if this completes the prefill.

        The first row since the sequence was admitted, or held, resets its slot; each row sends the
        pages up to its end that the device does not have.
        """
        pages, start = sequence.pages, sequence.num_computed_tokens
        if sequence.needs_slot_init:
            sequence.needs_slot_init = False
            pages.num_sent = 0
            self.init_slot(sequence)
        num_sent, prefill_done = pages.num_sent, count == sequence.num_new_tokens
        # A held sequence may have pages for more than its known tokens: it decodes from here on.
        end = -(-(start + count) // self._page_size)
        new_pages = pages.unsent(len(pages.tables[0]) if prefill_done else end)
        self.prefilling.append(sequence)
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.q_lens.append(count)
        self.tokens += sequence.tokens[start : start + count]
        self.num_new_pages.append(pages.num_sent - num_sent)
        self.new_pages += new_pages
        self.sample.append(prefill_done and sequence.request.params.pooling is None)
        self.pairs += count * (start + count / 2)
        if sequence.request.images and sequence.images_between(start, start + count):
            self.has_images = 1
        sequence.num_computed_tokens += count
        return prefill_done

    def init_slot(self, sequence: Sequence) -> None:
        params = sequence.request.params
        history = list(sequence.tokens) if params.needs_history else []
        self.new_rows.append(
            NewRow(
                sequence.slot,
                params,
                sequence.seed,
                sequence.prompt_len,
                history,
                tuple(
                    RowImage(one.start, one.width, one.height, one.digest)
                    for one in sequence.request.images
                ),
            )
        )

    def build(self, requests: RequestTable | None = None) -> SchedulerOutput:
        """requests: without it, of a model without recurrent states"""
        decoding, rows = self.decoding, self.decode_rows
        num_new_pages, sample, tokens = ZEROS[:rows], TRUES[:rows], LASTS[:rows]
        if decoding.new_pages:
            num_new_pages = np.bincount(decoding.new_page_rows, minlength=rows)
        if decoding.num_tokens > rows:
            tokens = np.full(decoding.num_tokens, DRAFT, dtype=np.int64)
            tokens[np.cumsum(decoding.q_lens) - decoding.q_lens] = LAST
        new_pages = decoding.new_pages + self.new_pages
        if self.sample:
            sample = np.concatenate((sample, np.array(self.sample, dtype=np.bool_)))
        slots = _joined(decoding.slots, self.slots)
        state_slots, within, saves, loads, pages, copies = EMPTY, (), (), (), (), ()
        if requests is not None and requests.states.num_states:
            saves, loads, pages = requests.snapshots.take_copies()
            state_slots, copies = requests.states.schedule(slots)
            if self.snapshots is not None:
                within = tuple(self.snapshots.within)
                self.snapshots.save()
        work, dropped = self.encoder, ()
        if requests is not None and requests.images.dropped:
            dropped = requests.images.take_dropped()
        batch = Batch(
            slots=slots,
            starts=_joined(decoding.starts, self.starts),
            q_lens=_joined(decoding.q_lens, self.q_lens),
            tokens=_joined(tokens, self.tokens),
            num_new_pages=_joined(num_new_pages, self.num_new_pages),
            new_pages=np.array(new_pages, dtype=np.int64) if new_pages else EMPTY,
            sample=sample,
            decode_rows=rows,
            new_rows=self.new_rows,
            state_slots=state_slots,
            state_snapshots=within,
            page_copies=pages,
            state_saves=saves,
            state_loads=loads,
            state_copies=copies,
            image_stages=() if work is None else tuple(work.stages),
            images_dropped=dropped,
        )
        load = StepLoad(decoding.num_tokens, len(self.tokens), self.kv_tokens, self.pairs)
        if work is not None:
            load = load._replace(
                encoder_stages=work.num_stages,
                encoder_operations=work.operations,
                has_images=self.has_images,
            )
        return SchedulerOutput(batch, decoding, self.prefilling, load, [])


def _joined(decode: Int64Array, prefill: list[int]) -> Int64Array:
    return np.concatenate((decode, np.array(prefill, dtype=np.int64))) if prefill else decode
