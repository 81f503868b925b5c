"""Admission: which waiting sequences get a slot and pages, and who makes room for them."""

from __future__ import annotations

from runtime.messages import BACKGROUND
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence

HELD_SECONDS = 1.0  # that a held request keeps its slot and pages while others wait


class Admission:
    """All pages of the known tokens are allocated at admission, so only decoding can run out of
    pages later.  No function iterates over the waiting queue beyond its front."""

    def __init__(self, requests: RequestTable) -> None:
        self.prompt_tokens: int = 0  # computed or cached, of all that were admitted
        self.cached_tokens: int = 0
        self._requests = requests
        # A sequence that lacked pages, and pool.num_releases then: retried once that has changed.
        self._blocked: tuple[Sequence, int] | None = None

    def preempt_for_head(self) -> bool:
        """If the head of the waiting queue lacks room, preempt a sequence that yields to it.

        Background sequences yield to all others, and those held for HELD_SECONDS to every request.
        True if one was preempted.
        """
        requests = self._requests
        head = requests.waiting.head()
        if head is None or (not requests.full and not self._lacks_pages(head)):
            return False
        victim = requests.longest_held(requests.clock() - HELD_SECONDS)
        if victim is None:
            if head.request.priority >= BACKGROUND or not requests.num_background:
                return False
            victim = requests.lowest_priority()
        requests.preempt(victim)
        return True

    def _lacks_pages(self, head: Sequence) -> bool:
        """Whether it was refused pages, and those freed since do not suffice either."""
        if self._blocked is None or self._blocked[0] is not head:
            return False
        releases = self._requests.pool.num_releases
        return self._blocked[1] == releases or self._pages_for(head) is None

    def candidates(self, background_preempted: bool) -> list[Sequence]:
        """The front of the waiting queue that may be admitted, in order."""
        if self._requests.full:
            return []
        front = self._requests.waiting.front()
        if background_preempted:
            return [one for one in front if one.request.priority < BACKGROUND]
        return list(front)

    def admissible(self, candidates: list[Sequence]) -> tuple[int, int]:
        """About how many waiting sequences find room now, and their prompt tokens to compute.

        Those that find none do not count for the size of a step: a larger one would not help them.
        Of the prompts, as much is expected to be cached as of those that finished lately.
        """
        requests = self._requests
        if not candidates or self._is_blocked(candidates[0]):
            return 0, 0
        waiting, page_size = requests.waiting, requests.resolved.page_size
        count = min(waiting.num_admissible, requests.num_free_slots)
        tokens = waiting.num_tokens * count / waiting.num_admissible
        tokens = min(tokens * requests.mix.computed_share, requests.pool.num_free * page_size)
        return count, max(int(tokens), 1)

    def try_admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages.  False if there is no room, or it failed."""
        requests = self._requests
        if requests.full or sequence.finish is not None or self._is_blocked(sequence):
            return False
        try:
            pages = self._claim_pages(sequence)
        except Exception as error:
            requests.finish_failed(sequence, error)
            return False
        if pages is None:
            self._blocked = (sequence, requests.pool.num_releases)
            return False
        requests.admit(sequence, pages)
        if not sequence.first_output_sent:
            sequence.prompt_scores = None
        if not sequence.first_scheduled_at:
            sequence.first_scheduled_at = requests.clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += sequence.num_cached_tokens
        return True

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether it, or one ahead of it, was refused pages, and none has been released since."""
        if self._blocked is None:
            return False
        blocked, releases = self._blocked
        if blocked.finish is not None or blocked.slot >= 0:
            return False
        unchanged = releases == self._requests.pool.num_releases
        return unchanged and blocked.priority_key <= sequence.priority_key

    def _claim_pages(self, sequence: Sequence) -> list[int] | None:
        """Pages for all known tokens, cached ones shared; None if too few are free."""
        assert not sequence.has_unread_row
        found = self._pages_for(sequence)
        if found is None:
            return None
        hits, missing = found
        pool, page_size = self._requests.pool, self._requests.resolved.page_size
        pool.share(hits)
        sequence.num_computed_tokens = len(hits) * page_size
        return hits + pool.allocate(missing)

    def _pages_for(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """The cached pages, and how many new ones it needs; None if too few are free."""
        requests = self._requests
        pool, page_size = requests.pool, requests.resolved.page_size
        hits: list[int] = []
        if requests.resolved.prefix_cache and sequence.may_use_prefix_cache:
            hashes = sequence.hash_pages(page_size)
            # At least one token is computed: without it there would be no logits to sample from.
            hits = pool.lookup(hashes[: (len(sequence.tokens) - 1) // page_size])
        missing = -(-len(sequence.tokens) // page_size) - len(hits)
        # Each running sequence may need pages soon: admission must not lead to preemption.
        soon = requests.num_running * -(-requests.resolved.max_tokens_per_row // page_size)
        if missing + pool.count_free(hits) + soon > pool.num_free:
            return None
        return hits, missing
