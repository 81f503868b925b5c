"""Scheduler: what runs in the next step.

There is no prefill phase and no decode phase.  Each sequence catches up
`todo = len(tokens) + ahead - launched`, rows with one token first, then parts of prompts as far as
the budget goes.  All pages of the known tokens are taken when a sequence is admitted, so only
decoding can run out of pages; then the last in rank gives up its pages and computes them again
later.  Nothing here looks at more of the waiting line than its front.

A row that has no mask when its step samples is left out of that step, and its request is held:
it has no row until its mask is here, and gives way first if others need its pages or slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

from runtime.config import ResolvedConfig
from runtime.messages import BACKGROUND
from runtime.scheduler.batch_builder import BatchBuilder, SchedulerOutput
from runtime.scheduler.chunked_prefill import ChunkBudget, Prompts
from runtime.scheduler.decode_columns import NO_ROWS, DecodeRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepTimes

HELD_SECONDS = 1.0  # so long a held request keeps its slot and pages from those that wait


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
        # One who did not fit, and the pool's releases then: no use to look again before.
        self._blocked: tuple[Sequence, int] | None = None

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before commit() or add()."""
        background_preempted = False
        while True:
            more = self._preempt_background()
            background_preempted = background_preempted or more
            builder = self._step(background_preempted)
            if builder.num_rows or not more:
                return builder.launch() if builder.num_rows else None

    def _preempt_background(self) -> bool:
        """Preempt who makes way, if the head of the line found no room.  True if somebody did.

        Work in the background makes way for other work, and one that is held long for everybody.
        """
        head = self.waiting.head()
        if head is None:
            return False
        if not self.running.full and not self._lacks_pages(head):
            return False
        yields = self.running.longest_held(self.clock() - HELD_SECONDS)
        if yields is None:
            if head.request.priority >= BACKGROUND or not self.running.num_background:
                return False
            yields = self.running.last_in_rank()
        self._preempt(yields)
        return True

    def _lacks_pages(self, head: Sequence) -> bool:
        """It was refused pages, and those that came free since are not enough, either."""
        if self._blocked is None or self._blocked[0] is not head:
            return False
        return self._blocked[1] == self.pool.num_releases or self._pages_for(head) is None

    def _step(self, background_preempted: bool) -> BatchBuilder:
        """yielded: work in the background has just made way, and may not come back at once."""
        preemptions = self.num_preemptions
        builder = BatchBuilder(self._decode())
        # A sequence preempted in this step may have a row in the one that is under way: it comes
        # back after commit() has seen that row.
        if preemptions == self.num_preemptions:
            self._prompts(builder, self._admissible(background_preempted))
        else:
            self._prompts(builder, [])
        self.running.record_step(builder.num_rows)
        return builder

    def _decode(self) -> DecodeRows:
        """A row for each sequence that has caught up."""
        pool, decoding = self.pool, self.running.decoding
        while len(decoding):
            owners, starts, new_page_rows = decoding.next_rows(self.resolved.max_batched_tokens)
            if len(new_page_rows) <= pool.num_free:
                return decoding.launch(owners, starts, new_page_rows, pool.take(len(new_page_rows)))
            assert len(self.running) > 1, "one sequence alone always has enough pages"
            self._preempt(self.running.longest_held() or self.running.last_in_rank())
        return NO_ROWS

    def _preempt(self, sequence: Sequence) -> None:
        """Take its pages; it waits in its old place and will compute them again."""
        self._free_slot(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def _admissible(self, background_preempted: bool) -> list[Sequence]:
        """Those at the front of the waiting line who may get a slot, in rank."""
        if self.running.full or not len(self.waiting):
            return []
        front = self.waiting.front()
        if background_preempted:
            return [one for one in front if one.request.priority < BACKGROUND]
        return list(front)

    def _prompts(self, builder: BatchBuilder, waiting: list[Sequence]) -> None:
        """Parts of prompts, as many tokens as the budget has; lets some of `waiting` in.

        Of one priority those with far less to do come first, so that nobody waits for a long
        prompt; the first in rank gets at least half of the tokens, so that a long one ends, too.
        """
        prefilling = [one for one in self.running.prefilling.values() if one.held is None]
        if not prefilling and not waiting:
            return
        left = self._prompt_budget(builder, prefilling, waiting)
        if left <= 0:
            return
        first = min(chain(prefilling, waiting[:1]), key=lambda one: one.rank)
        # Before anybody else can take the pages that it needs.
        if first.slot < 0:
            self._try_admit(first)
        kept = min(first.num_new_tokens, left - left // 2) if first.slot >= 0 else 0
        for sequence in sorted(chain(prefilling, waiting), key=_shortest_first):
            kept = 0 if sequence is first else kept
            if left <= kept:
                continue
            if sequence.slot >= 0 or self._try_admit(sequence):
                count = min(sequence.num_new_tokens, left - kept)
                left -= count
                new_pages: list[int] = []
                if sequence.begins:
                    builder.start(sequence)
                    new_pages, sequence.begins = sequence.pages, False
                if builder.add_prefill(sequence, count, new_pages):
                    self.running.start_decoding(sequence)

    def _prompt_budget(
        self, builder: BatchBuilder, prefilling: list[Sequence], waiting: list[Sequence]
    ) -> int:
        prompts = Prompts(
            len(prefilling) + len(waiting),
            sum([sequence.num_new_tokens for sequence in prefilling]) + self.waiting.num_tokens,
            max([sequence.num_computed_tokens for sequence in prefilling], default=0),
        )
        return self.chunks.tokens(builder.decode_rows, builder.kv_tokens, prompts)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give a slot and pages to one who waits.  False if there is no room, or it failed."""
        if self.running.full or sequence.finish is not None or self._is_blocked(sequence):
            return False
        try:
            pages = self._claim_pages(sequence)
        except Exception as error:
            self._end_broken(sequence, error)
            return False
        if pages is None:
            self._blocked = (sequence, self.pool.num_releases)
            return False
        self._admit(sequence, pages)
        return True

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Somebody before it in rank, or itself, was refused pages, and none came free since."""
        if self._blocked is None:
            return False
        blocked, releases = self._blocked
        waits = blocked.finish is None and blocked.slot < 0
        return waits and releases == self.pool.num_releases and blocked.rank <= sequence.rank

    def _claim_pages(self, sequence: Sequence) -> list[int] | None:
        """Pages for all known tokens, the remembered ones shared; None if there are not enough."""
        assert not sequence.unread_tokens
        found = self._pages_for(sequence)
        if found is None:
            return None
        hits, missing = found
        self.pool.share(hits)
        sequence.num_computed_tokens = len(hits) * self.resolved.page_size
        return hits + self.pool.take(missing)

    def _pages_for(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """The remembered pages, and how many more it takes; None if there are not enough."""
        pool, page_size = self.pool, self.resolved.page_size
        hits: list[int] = []
        if self.resolved.prefix_cache and sequence.may_use_prefix_cache:
            hashes = sequence.hash_pages(page_size)
            # One token at least is computed: without it there would be no logits to sample from.
            hits = pool.lookup(hashes[: (len(sequence.tokens) - 1) // page_size])
        missing = -(-len(sequence.tokens) // page_size) - len(hits)
        # Those that run may each need a page soon; to be admitted and preempted helps nobody.
        if missing + pool.count_free(hits) + len(self.running) > pool.num_free:
            return None
        return hits, missing

    def _admit(self, sequence: Sequence, pages: list[int]) -> None:
        self.waiting.take(sequence)
        self.running.add_sequence(sequence)
        sequence.pages = pages
        if not sequence.first_output_sent:
            sequence.prompt_scores = None
        if not sequence.started:
            sequence.started = self.clock()
            sequence.cached = sequence.num_computed_tokens
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += sequence.cached

    # A mask is late.

    def hold_back(self, launch: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Leave rows that sample out of a step: their requests are held until go_on().

        The step's forward pass is queued, and the step before has been committed.
        """
        now = self.clock()
        decoding = [row for row in rows if row < launch.batch.decode_rows]
        for row, sequence in self._alive(launch, decoding):
            if row in rows:
                self.running.hold(sequence, now)
        return launch.without(rows)

    def go_on(self, request_id: int) -> None:
        """A request that was held, if it is still alive, may have rows again."""
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.held is not None:
            sequence.held = None
            if sequence.slot < 0:
                self.waiting.push(sequence)


def _shortest_first(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then by what is left to do; within a factor of four, by arrival."""
    return (sequence.request.priority, sequence.num_new_tokens.bit_length() // 2, sequence.order)
