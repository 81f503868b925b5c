"""Scheduler: what runs in the next step.

There is no prefill phase and no decode phase.  Each sequence has
`num_new_tokens = len(tokens) + unread_tokens - num_computed_tokens` to compute: a step takes all
decode rows first, then chunks of prefill as far as the token budget goes.  All pages of the known
tokens are allocated at admission, so only decoding can run out of pages; then the sequence of
lowest priority is preempted and recomputed later.  No function iterates over the waiting queue
beyond its front.

A row whose mask is late when its step samples is left out of that step, and its request is held:
it has no row until its mask arrives, and is preempted first if others need its pages or slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

from runtime.config import ResolvedConfig
from runtime.messages import BACKGROUND
from runtime.scheduler.batch_builder import BatchBuilder, SchedulerOutput
from runtime.scheduler.chunked_prefill import ChunkBudget, PrefillLoad
from runtime.scheduler.decode_columns import NO_DECODE_ROWS, DecodeRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepTimes

HELD_SECONDS = 1.0  # that a held request keeps its slot and pages while others wait


class Scheduler(RequestTable):
    def __init__(
        self,
        resolved: ResolvedConfig,
        vocab_size: int,
        *,
        next_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(resolved, vocab_size, next_seed=next_seed, clock=clock)
        self.times = StepTimes()
        self.chunks = ChunkBudget(resolved, self.times)
        self.num_preemptions = 0
        # A sequence that lacked pages, and pool.num_releases then: retried once that has changed.
        self._blocked: tuple[Sequence, int] | None = None

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before commit() or add()."""
        background_preempted = False
        while True:
            preempted = self._preempt_for_head()
            background_preempted = background_preempted or preempted
            builder = self._step(background_preempted)
            if builder.num_rows or not preempted:
                return builder.build() if builder.num_rows else None

    def _preempt_for_head(self) -> bool:
        """If the head of the waiting queue lacks room, preempt a sequence that yields to it.

        Background sequences yield to all others, and those held for HELD_SECONDS to every request.
        True if one was preempted.
        """
        head = self.waiting.head()
        if head is None:
            return False
        if not self.running.full and not self._lacks_pages(head):
            return False
        victim = self.running.longest_held(self.clock() - HELD_SECONDS)
        if victim is None:
            if head.request.priority >= BACKGROUND or not self.running.num_background:
                return False
            victim = self.running.lowest_priority()
        self._preempt(victim)
        return True

    def _lacks_pages(self, head: Sequence) -> bool:
        """Whether it was refused pages, and those freed since do not suffice either."""
        if self._blocked is None or self._blocked[0] is not head:
            return False
        return self._blocked[1] == self.pool.num_releases or self._pages_for(head) is None

    def _step(self, background_preempted: bool) -> BatchBuilder:
        """`background_preempted`: a sequence just yielded, so background work is not admitted."""
        preemptions = self.num_preemptions
        builder = BatchBuilder(self._decode())
        # A sequence preempted in this step may have a row in the step in flight: it is admitted
        # again after commit() of that row.
        if preemptions == self.num_preemptions:
            self._schedule_prefills(builder, self._admissible(background_preempted))
        else:
            self._schedule_prefills(builder, [])
        self.running.record_step(builder.num_rows)
        return builder

    def _decode(self) -> DecodeRows:
        """A row for each decoding sequence; preempts while there are too few pages."""
        pool, decoding = self.pool, self.running.decoding
        while len(decoding):
            requests, starts, new_page_rows = decoding.select_rows(self.resolved.max_batched_tokens)
            if len(new_page_rows) <= pool.num_free:
                pages = pool.allocate(len(new_page_rows))
                return decoding.schedule_rows(requests, starts, new_page_rows, pages)
            assert len(self.running) > 1, "one sequence alone always has enough pages"
            self._preempt(self.running.longest_held() or self.running.lowest_priority())
        return NO_DECODE_ROWS

    def _preempt(self, sequence: Sequence) -> None:
        """Free its slot and pages; it waits at its old priority and is recomputed later."""
        self._free_slot(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def _admissible(self, background_preempted: bool) -> list[Sequence]:
        """The front of the waiting queue that may be admitted, in order."""
        if self.running.full or not len(self.waiting):
            return []
        front = self.waiting.front()
        if background_preempted:
            return [one for one in front if one.request.priority < BACKGROUND]
        return list(front)

    def _schedule_prefills(self, builder: BatchBuilder, waiting: list[Sequence]) -> None:
        """Add chunks of prefill up to the token budget; admits some of `waiting`.

        Within a priority those with far fewer tokens left come first, so that they do not wait for
        a long prompt; the first by priority key gets at least half of the tokens, so that a long
        prompt progresses, too.
        """
        prefilling = [one for one in self.running.prefilling.values() if one.held_since is None]
        if not prefilling and not waiting:
            return
        left = self._prefill_budget(builder, prefilling, waiting)
        if left <= 0:
            return
        first = min(chain(prefilling, waiting[:1]), key=lambda one: one.priority_key)
        # Admitted before others can take the pages that it needs.
        if first.slot < 0:
            self._try_admit(first)
        reserved = min(first.num_new_tokens, left - left // 2) if first.slot >= 0 else 0
        for sequence in sorted(chain(prefilling, waiting), key=_shortest_first):
            reserved = 0 if sequence is first else reserved
            if left <= reserved:
                continue
            if sequence.slot >= 0 or self._try_admit(sequence):
                count = min(sequence.num_new_tokens, left - reserved)
                left -= count
                new_pages: list[int] = []
                if sequence.needs_slot_init:
                    builder.init_slot(sequence)
                    new_pages, sequence.needs_slot_init = sequence.pages, False
                if builder.add_prefill(sequence, count, new_pages):
                    self.running.start_decoding(sequence)

    def _prefill_budget(
        self, builder: BatchBuilder, prefilling: list[Sequence], waiting: list[Sequence]
    ) -> int:
        load = PrefillLoad(
            len(prefilling) + len(waiting),
            sum([sequence.num_new_tokens for sequence in prefilling]) + self.waiting.num_tokens,
            max([sequence.num_computed_tokens for sequence in prefilling], default=0),
        )
        return self.chunks.tokens(builder.decode_rows, builder.kv_tokens, load)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages.  False if there is no room, or it failed."""
        if self.running.full or sequence.finish is not None or self._is_blocked(sequence):
            return False
        try:
            pages = self._claim_pages(sequence)
        except Exception as error:
            self._finish_failed(sequence, error)
            return False
        if pages is None:
            self._blocked = (sequence, self.pool.num_releases)
            return False
        self._admit(sequence, pages)
        return True

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether it, or one ahead of it, was refused pages, and none has been released since."""
        if self._blocked is None:
            return False
        blocked, releases = self._blocked
        if blocked.finish is not None or blocked.slot >= 0 or releases != self.pool.num_releases:
            return False
        return blocked.priority_key <= sequence.priority_key

    def _claim_pages(self, sequence: Sequence) -> list[int] | None:
        """Pages for all known tokens, cached ones shared; None if too few are free."""
        assert not sequence.unread_tokens
        found = self._pages_for(sequence)
        if found is None:
            return None
        hits, missing = found
        self.pool.share(hits)
        sequence.num_computed_tokens = len(hits) * self.resolved.page_size
        return hits + self.pool.allocate(missing)

    def _pages_for(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """The cached pages, and how many new ones it needs; None if too few are free."""
        pool, page_size = self.pool, self.resolved.page_size
        hits: list[int] = []
        if self.resolved.prefix_cache and sequence.may_use_prefix_cache:
            hashes = sequence.hash_pages(page_size)
            # At least one token is computed: without it there would be no logits to sample from.
            hits = pool.lookup(hashes[: (len(sequence.tokens) - 1) // page_size])
        missing = -(-len(sequence.tokens) // page_size) - len(hits)
        # Each running sequence may need a page soon: admission must not lead to preemption.
        if missing + pool.count_free(hits) + len(self.running) > pool.num_free:
            return None
        return hits, missing

    def _admit(self, sequence: Sequence, pages: list[int]) -> None:
        self.waiting.remove(sequence)
        self.running.add_sequence(sequence)
        sequence.pages = pages
        if not sequence.first_output_sent:
            sequence.prompt_scores = None
        if not sequence.first_scheduled_at:
            sequence.first_scheduled_at = self.clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += sequence.num_cached_tokens

    # Late masks.

    def hold_rows(self, scheduler_output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Leave rows that sample out of a step and hold their requests until resume_held().

        The step's forward pass is queued, and the previous step has been committed.
        """
        now = self.clock()
        decoding = [row for row in rows if row < scheduler_output.batch.decode_rows]
        for row, sequence in self._live_rows(scheduler_output, decoding):
            if row in rows:
                self.running.hold(sequence, now)
        return scheduler_output.without_sampling(rows)

    def resume_held(self, request_id: int) -> None:
        """A held request, if it is still live, may have rows again."""
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.held_since is not None:
            sequence.held_since = None
            if sequence.slot < 0:
                self.waiting.push(sequence)


def _shortest_first(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then by tokens left; within a factor of four, by arrival."""
    size = sequence.num_new_tokens.bit_length() // 2
    return (sequence.request.priority, size, sequence.arrival_index)
