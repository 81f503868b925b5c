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

from runtime.config import Resolved
from runtime.messages import BACKGROUND
from runtime.scheduler.batch_builder import Columns, Launch
from runtime.scheduler.chunked_prefill import ChunkBudget, Prompts
from runtime.scheduler.decode_columns import NO_ROWS, DecodeRows
from runtime.scheduler.request_table import Requests
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepTimes

HELD_SECONDS = 1.0  # so long a held request keeps its slot and pages from those that wait


class Scheduler(Requests):
    def __init__(
        self,
        resolved: Resolved,
        vocab_size: int,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(resolved, vocab_size, draw_seed=draw_seed, clock=clock)
        self.times = StepTimes()
        self.chunks = ChunkBudget(resolved, self.times)
        self.num_preemptions = 0
        # One who did not fit, and the pool's releases then: no use to look again before.
        self._blocked: tuple[Sequence, int] | None = None

    def schedule(self) -> Launch | None:
        """The next step, or None if nothing can be done before commit() or add()."""
        yielded = False
        while True:
            more = self._make_way()
            yielded = yielded or more
            columns = self._step(yielded)
            if columns.num_rows or not more:
                return columns.launch() if columns.num_rows else None

    def _make_way(self) -> bool:
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

    def _step(self, yielded: bool) -> Columns:
        """yielded: work in the background has just made way, and may not come back at once."""
        preemptions = self.num_preemptions
        columns = Columns(self._decode())
        # A sequence preempted in this step may have a row in the one that is under way: it comes
        # back after commit() has seen that row.
        if preemptions == self.num_preemptions:
            self._prompts(columns, self._may_enter(yielded))
        else:
            self._prompts(columns, [])
        self.running.note_step(columns.num_rows)
        return columns

    def _decode(self) -> DecodeRows:
        """A row for each sequence that has caught up."""
        pool, decoding = self.pool, self.running.decoding
        while len(decoding):
            members, starts, crossing = decoding.next_rows(self.resolved.max_batched_tokens)
            if len(crossing) <= pool.num_free:
                return decoding.launch(members, starts, crossing, pool.take(len(crossing)))
            assert len(self.running) > 1, "one sequence alone always has enough pages"
            self._preempt(self.running.longest_held() or self.running.last_in_rank())
        return NO_ROWS

    def _preempt(self, sequence: Sequence) -> None:
        """Take its pages; it waits in its old place and will compute them again."""
        self._leave(sequence)
        sequence.launched = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def _may_enter(self, yielded: bool) -> list[Sequence]:
        """Those at the front of the waiting line who may get a slot, in rank."""
        if self.running.full or not len(self.waiting):
            return []
        front = self.waiting.front()
        if yielded:
            return [one for one in front if one.request.priority < BACKGROUND]
        return list(front)

    def _prompts(self, columns: Columns, waiting: list[Sequence]) -> None:
        """Parts of prompts, as many tokens as the budget has; lets some of `waiting` in.

        Of one priority those with far less to do come first, so that nobody waits for a long
        prompt; the first in rank gets at least half of the tokens, so that a long one ends, too.
        """
        under_way = [one for one in self.running.prefilling.values() if one.held is None]
        if not under_way and not waiting:
            return
        left = self._prompt_budget(columns, under_way, waiting)
        if left <= 0:
            return
        first = min(chain(under_way, waiting[:1]), key=lambda one: one.rank)
        # Before anybody else can take the pages that it needs.
        if first.slot < 0:
            self._let_in(first)
        kept = min(first.todo, left - left // 2) if first.slot >= 0 else 0
        for sequence in sorted(chain(under_way, waiting), key=_much_less_to_do):
            kept = 0 if sequence is first else kept
            if left <= kept:
                continue
            if sequence.slot >= 0 or self._let_in(sequence):
                count = min(sequence.todo, left - kept)
                left -= count
                new_pages: list[int] = []
                if sequence.begins:
                    columns.start(sequence)
                    new_pages, sequence.begins = sequence.pages, False
                if columns.feed(sequence, count, new_pages):
                    self.running.catch_up(sequence)

    def _prompt_budget(
        self, columns: Columns, under_way: list[Sequence], waiting: list[Sequence]
    ) -> int:
        prompts = Prompts(
            len(under_way) + len(waiting),
            sum([sequence.todo for sequence in under_way]) + self.waiting.num_tokens,
            max([sequence.launched for sequence in under_way], default=0),
        )
        return self.chunks.tokens(columns.decode_rows, columns.kv_tokens, prompts)

    def _let_in(self, sequence: Sequence) -> bool:
        """Give a slot and pages to one who waits.  False if there is no room, or it failed."""
        if self.running.full or sequence.finish is not None or self._is_behind(sequence):
            return False
        try:
            pages = self._claim_pages(sequence)
        except Exception as error:
            self._end_broken(sequence, error)
            return False
        if pages is None:
            self._blocked = (sequence, self.pool.num_releases)
            return False
        self._enter(sequence, pages)
        return True

    def _is_behind(self, sequence: Sequence) -> bool:
        """Somebody before it in rank, or itself, was refused pages, and none came free since."""
        if self._blocked is None:
            return False
        blocked, releases = self._blocked
        waits = blocked.finish is None and blocked.slot < 0
        return waits and releases == self.pool.num_releases and blocked.rank <= sequence.rank

    def _claim_pages(self, sequence: Sequence) -> list[int] | None:
        """Pages for all known tokens, the remembered ones shared; None if there are not enough."""
        assert not sequence.ahead
        found = self._pages_for(sequence)
        if found is None:
            return None
        hits, missing = found
        self.pool.share(hits)
        sequence.launched = len(hits) * self.resolved.page_size
        return hits + self.pool.take(missing)

    def _pages_for(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """The remembered pages, and how many more it takes; None if there are not enough."""
        pool, page_size = self.pool, self.resolved.page_size
        hits: list[int] = []
        if self.resolved.prefix_cache and sequence.may_skip:
            hashes = sequence.hash_pages(page_size)
            # One token at least is computed: without it there would be no logits to sample from.
            hits = pool.lookup(hashes[: (len(sequence.tokens) - 1) // page_size])
        missing = -(-len(sequence.tokens) // page_size) - len(hits)
        # Those that run may each need a page soon; to be admitted and preempted helps nobody.
        if missing + pool.count_free(hits) + len(self.running) > pool.num_free:
            return None
        return hits, missing

    def _enter(self, sequence: Sequence, pages: list[int]) -> None:
        self.waiting.take(sequence)
        self.running.enter(sequence)
        sequence.pages = pages
        if not sequence.announced:
            sequence.prompt_scores = None
        if not sequence.started:
            sequence.started = self.clock()
            sequence.cached = sequence.launched
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += sequence.cached

    # A mask is late.

    def hold_back(self, launch: Launch, rows: list[int]) -> Launch:
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


def _much_less_to_do(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts by priority, then by what is left to do; within a factor of four, by arrival."""
    return (sequence.request.priority, sequence.todo.bit_length() // 2, sequence.order)
