"""Prefill: which prompts a step computes tokens of, how many, and the rows that they become.

A step that only decodes has none of this.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from msgspec import structs

from runtime.scheduler.admission import Admission
from runtime.scheduler.batch import Batch, Int64Array, NewRow, RowImage
from runtime.scheduler.chunked_prefill import ChunkBudget, PrefillLoad
from runtime.scheduler.decode_columns import DecodeRows
from runtime.scheduler.images.encoder_schedule import EncoderSchedule, EncoderWork
from runtime.scheduler.images.features import unread_images
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.step_snapshots import StepSnapshots
from runtime.scheduler.step_time import StepLoad, StepTimes


class PrefillRows:
    """The rows of a step that prefill, after its decode rows: a chunk of a prompt each."""

    def __init__(self, decoding: DecodeRows, page_size: int) -> None:
        self.decoding, self._page_size = decoding, page_size
        self.decode_rows = len(decoding.slots)
        self.snapshots: StepSnapshots | None = None  # in models with recurrent states
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.q_lens: list[int] = []
        self.tokens: list[int] = []
        self.num_new_pages: list[int] = []
        self.new_pages: list[int] = []
        self.sample: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.lacks_pages = False  # a chunk was left out for which there was no page
        self.pairs = 0.0  # query-key pairs
        self.encoder: EncoderWork | None = None  # of a step that may have prompts with images
        self.has_images = 0

    @property
    def num_rows(self) -> int:
        """Of the step: those that decode are counted, too."""
        return self.decode_rows + len(self.sequences)

    @property
    def waits_for_encoder(self) -> bool:
        """Whether prompts get nothing of the step, or stages of the encoder would be its only work:
        a step without rows does not run."""
        work = self.encoder
        return not (work is None or self.sequences or (work.stages and self.decode_rows))

    def add(self, sequence: Sequence, count: int) -> bool:
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
        self.sequences.append(sequence)
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
        images = tuple(
            RowImage(one.start, one.width, one.height, one.digest)
            for one in sequence.request.images
        )
        prompt_len, seed = sequence.prompt_len, sequence.seed
        self.new_rows.append(NewRow(sequence.slot, params, seed, prompt_len, history, images))

    def join(self, batch: Batch, load: StepLoad) -> tuple[Batch, StepLoad]:
        """A step of decode rows and these rows after them, by the batch and the load of the decode
        rows alone."""
        if self.sequences:
            columns = ("slots", "starts", "q_lens", "tokens", "num_new_pages", "new_pages")
            joined = {name: _joined(getattr(batch, name), getattr(self, name)) for name in columns}
            sample = np.concatenate((batch.sample, np.array(self.sample, dtype=np.bool_)))
            batch = structs.replace(batch, **joined, sample=sample, new_rows=self.new_rows)
            load = load._replace(prompt_tokens=len(self.tokens), pairs=self.pairs)
        if self.encoder is not None:
            batch = structs.replace(batch, image_stages=tuple(self.encoder.stages))
            load = load._replace(
                encoder_stages=self.encoder.num_stages,
                encoder_operations=self.encoder.operations,
                has_images=self.has_images,
            )
        return batch, load


def _joined(decode: Int64Array, prefill: list[int]) -> Int64Array:
    return np.concatenate((decode, np.array(prefill, dtype=np.int64))) if prefill else decode


class Prefill:
    """Decides which chunks of prompts a step has, and admits sequences that wait."""

    def __init__(self, requests: RequestTable, admission: Admission, times: StepTimes) -> None:
        self.requests = requests
        self.admission = admission
        self.chunks = ChunkBudget(requests.resolved, times, requests.mix)
        self.encoder = EncoderSchedule(requests, times)

    def schedule(self, decoding: DecodeRows, waiting: list[Sequence]) -> PrefillRows:
        """The rows beside those of `decoding`; `waiting`: sequences that may be admitted."""
        requests = self.requests
        rows = PrefillRows(decoding, requests.resolved.page_size)
        if requests.states.num_states:
            rows.snapshots = StepSnapshots(requests.snapshots, requests.states)
        self._add_chunks(rows, waiting)
        return rows

    def _add_chunks(self, rows: PrefillRows, waiting: list[Sequence]) -> None:
        """Add chunks of prefill up to the token budget; admits some of `waiting`.

        Within a priority those with far fewer tokens left come first, so that they do not wait for
        a long prompt; the first by priority key gets at least half of the tokens, so that a long
        prompt progresses, too.
        """
        prefilling = [one for one in self.requests.prefilling.values() if one.held_since is None]
        if not prefilling and not waiting:
            return
        budget = self._prefill_budget(rows, prefilling, waiting)
        if budget <= 0:
            return
        first = min(chain(prefilling, waiting[:1]), key=lambda one: one.priority_key)
        # Admitted before others can take the pages that it needs.
        if first.slot < 0:
            self.admission.try_admit(first)
        now = self.requests.clock()
        first, reserved = self._reserved(rows, first, budget)
        room, ordered = budget, sorted(chain(prefilling, waiting), key=_shortest_first)
        for sequence in ordered:
            reserved = 0 if sequence is first else reserved
            if room <= reserved:
                continue
            if sequence.slot >= 0 or self.admission.try_admit(sequence):
                room -= self._add_chunk(rows, sequence, room - reserved, now)
        for alone in (False, True):
            if not rows.waits_for_encoder:
                break
            self._add_any_chunk(rows, [first, *ordered], budget, now, alone=alone)

    def _add_any_chunk(
        self,
        rows: PrefillRows,
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
            if sequence.slot >= 0 and sequence.num_new_tokens and rows.waits_for_encoder:
                self._add_chunk(rows, sequence, room, now, alone=alone)

    def _add_chunk(
        self,
        rows: PrefillRows,
        sequence: Sequence,
        room: int,
        now: float,
        *,
        alone: bool = False,
    ) -> int:
        """Add a row of at most `room` tokens of a sequence that has a slot; less what the encoder
        costs.  -> what both take of the room"""
        count, cost = min(sequence.num_new_tokens, room), 0
        snapshots, num_waiting = rows.snapshots, self._num_admissible
        if snapshots is not None:
            count = snapshots.most_tokens(sequence, count, num_waiting)
        spare = self.requests.pages_soon
        count = self.requests.kv_pages.extend_for_chunk(sequence, count, spare)
        if count <= 0:
            rows.lacks_pages = True
            return 0
        if sequence.request.images:
            count, cost = self._encode(rows, sequence, count, room, alone=alone)
            if not count:
                return cost
        if snapshots is not None:
            count = snapshots.add_row(sequence, rows.num_rows, count, num_waiting)
        if count > 1 or not sequence.first_output_sent:  # not when it resumes after a mask
            sequence.note_event(now, count)
        if rows.add(sequence, count):
            self.requests.start_decoding(sequence)
        return cost + count

    @property
    def _num_admissible(self) -> int:
        return min(self.requests.waiting.count, self.requests.num_free_slots)

    def _reserved(self, rows: PrefillRows, first: Sequence, budget: int) -> tuple[Sequence, int]:
        """Which sequence gets tokens of the budget before all others, and how many: half of them,
        or more where the encoder cannot do less for its next one."""
        if first.slot < 0:
            return first, 0
        if rows.encoder is None:
            return first, min(first.num_new_tokens, budget - budget // 2)
        limits = rows.encoder.limits
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
        rows: PrefillRows,
        sequence: Sequence,
        count: int,
        room: int,
        *,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Let the encoder run for the next `count` tokens.  -> how many of them the step can have,
        and what the encoder costs, of `room` tokens for both."""
        work = rows.encoder
        assert work is not None, "a request with images was taken for a model that reads none"
        nothing_else = not rows.sequences and not work.stages
        count, cost = self.encoder.encode(
            work, sequence, count, room, must_run=nothing_else or alone, alone=alone
        )
        sequence.num_encoder_tokens += cost
        return count, cost

    def _prefill_budget(
        self, rows: PrefillRows, prefilling: list[Sequence], waiting: list[Sequence]
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
            limits = self.chunks.encoder_limits(rows.decoding.num_tokens, load)
            rows.encoder = EncoderWork(limits)
        return self.chunks.tokens(rows.decoding.num_tokens, rows.decoding.num_kv_tokens, load)


def _shortest_first(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then by tokens left; within a factor of four, by arrival."""
    size = sequence.num_new_tokens.bit_length() // 2
    return (sequence.request.priority, size, sequence.arrival_index)
