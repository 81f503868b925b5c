"""Admission: which waiting sequences get a slot and pages, and who makes room for them."""

from __future__ import annotations

from runtime.messages import BACKGROUND
from runtime.scheduler.kv_cache.kv_pages import Claim
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence

HELD_SECONDS = 1.0  # that a held request keeps its slot and pages while others wait


class Admission:
    """All pages of the known tokens are allocated or reserved at admission, those behind a window
    excepted, so that decoding alone runs out of pages later.  No function iterates over the waiting
    queue beyond its front."""

    def __init__(self, requests: RequestTable) -> None:
        self.prompt_tokens: int = 0  # computed or cached, of all that were admitted
        self.cached_tokens: int = 0
        self._requests = requests
        # A sequence that lacked room, and pool.num_releases then: retried once that has changed.
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
        """Whether it was refused room, and what was freed since does not suffice either."""
        if self._blocked is None or self._blocked[0] is not head:
            return False
        if not self._requests.states.has_room(head):
            return True
        releases = self._requests.pool.num_releases
        return self._blocked[1] == releases or self._claim(head) is None

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
        waiting, kv_pages = requests.waiting, requests.kv_pages
        count = min(waiting.num_admissible, requests.num_free_slots)
        tokens = waiting.num_tokens * count / waiting.num_admissible
        room = requests.pool.num_available // kv_pages.num_groups * requests.resolved.page_size
        tokens = min(tokens * requests.mix.computed_share, room)
        return count, max(int(tokens), 1)

    def try_admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages.  False if there is no room, or it failed."""
        requests = self._requests
        if requests.full or sequence.finish is not None or self._is_blocked(sequence):
            return False
        try:
            assert not sequence.has_unread_row
            claim = self._claim(sequence)
        except Exception as error:
            requests.finish_failed(sequence, error)
            return False
        if claim is None or not requests.states.has_room(sequence):
            self._blocked = (sequence, requests.pool.num_releases)
            return False
        requests.admit(sequence, claim)
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

    def _claim(self, sequence: Sequence) -> Claim | None:
        """What it can have, cached pages shared; None if too few are free."""
        # Admission must not lead to preemption.
        return self._requests.kv_pages.claim(sequence, self._requests.pages_soon)
