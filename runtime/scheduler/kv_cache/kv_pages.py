"""KVPages: which pages each sequence gets and gives back, in groups with and without a window.

Groups without a window get all pages of the known tokens when a sequence is admitted.  A group with
a window gets pages chunk by chunk, and gives back those that no later query sees once the step that
filled them is committed: by then their hashes are known, so that a prefix may hit them until they
are allocated again.  Meanwhile a quota is reserved for the sequence, its window and a chunk, so
that prompts make progress beside rows that decode.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.config import ResolvedConfig
from runtime.scheduler.kv_cache.page_pool import PagePool
from runtime.scheduler.kv_cache.prefix_hit import first_seen_page, longest_hit
from runtime.scheduler.kv_cache.sequence_pages import NO_PAGE, SequencePages
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.snapshots import SnapshotHit, StateSnapshots


class Claim(NamedTuple):
    """What a waiting sequence would hold once it is admitted."""

    num_cached: int  # pages of its prefix that are cached
    pages: SequencePages  # the cached ones, without a reference yet
    missing: int  # pages to allocate at once, of each group without a window
    snapshot: SnapshotHit | None = None  # of the recurrent state after the prefix


class KVPages:
    def __init__(self, resolved: ResolvedConfig, snapshots: StateSnapshots) -> None:
        """snapshots: in a model with recurrent states, a prefix is a hit where there is one."""
        self.pool = PagePool(resolved.num_pages, resolved.num_groups)
        self.capacity = resolved.kv_capacity
        self._windows, self._page_size = resolved.group_windows, resolved.page_size
        self.num_groups = resolved.num_groups
        self._full = [group for group, window in enumerate(self._windows) if not window]
        self._with_window = [group for group, window in enumerate(self._windows) if window]
        # Has all pages of a prefix that is cached, unless every group has a window.
        self.whole_group = self._full[0] if self._full else 0
        self._prefix_cache = resolved.prefix_cache
        self._snapshots, self._has_states = snapshots, resolved.num_states > 0

    def empty(self) -> SequencePages:
        return SequencePages(self.num_groups)

    # Admission.

    def claim(self, sequence: Sequence, spare: int) -> Claim | None:
        """What the sequence can have now, with `spare` pages left; None if that is too little."""
        size, known = self._page_size, len(sequence.tokens)
        total, cached, pages = self.capacity.pages_of(known), 0, self.empty()
        snapshot: SnapshotHit | None = None
        if self._prefix_cache and sequence.may_use_prefix_cache:
            hashes = sequence.hash_pages(size)
            # At least one token is computed: without it there would be no logits to sample from.
            usable = hashes[: (known - 1) // size]
            cached = longest_hit(self.pool, usable, self._windows, size)
            if self._has_states:
                snapshot = self._snapshots.find(sequence, cached, self.pool)
                cached = 0 if snapshot is None else snapshot.position // size
            for group, window in enumerate(self._windows):
                first = first_seen_page(cached * size, window, size)
                hits = self.pool.found(group, hashes[first:cached])
                pages.tables[group] = [NO_PAGE] * first + hits
                pages.firsts[group] = first
        missing = total - cached
        for group in self._with_window:
            most = self.capacity.prefill_pages(self._windows[group], known)
            pages.quota += min(most, total - pages.firsts[group])
        pages.reserved = self._still_reserved(pages, known)
        needed = missing * len(self._full) + pages.reserved + self.pool.count_free(pages.held())
        if needed + spare > self.pool.num_available:
            return None
        return Claim(cached, pages, missing, snapshot)

    def take(self, sequence: Sequence, claim: Claim) -> None:
        """Give the sequence what it has claimed, before anything else changes."""
        self.pool.share(claim.pages.held())
        self.pool.num_reserved += claim.pages.reserved
        for group in self._full:
            claim.pages.tables[group] += self.pool.allocate(claim.missing, group)
        sequence.pages = claim.pages
        sequence.num_computed_tokens = claim.num_cached * self._page_size
        if claim.snapshot is not None:
            sequence.num_computed_tokens = claim.snapshot.position

    # Decoding.

    def allocate_for_rows(self, count: int) -> list[int]:
        """A page of each group for `count` rows, those of a row side by side."""
        if self.num_groups == 1:
            return self.pool.allocate(count)
        by_group = [self.pool.allocate(count, group) for group in range(self.num_groups)]
        return [page for pages in zip(*by_group, strict=True) for page in pages]

    # Prefill.

    def extend_for_chunk(self, sequence: Sequence, count: int, spare: int) -> int:
        """Allocate what a chunk of up to `count` tokens needs in groups with a window.

        Returns the tokens for which there are pages, perhaps none.  What is reserved for the
        sequence is used, and what is available beyond `spare` pages.
        """
        if not self._with_window:
            return count
        pages, start = sequence.pages, sequence.num_computed_tokens
        have = len(pages.tables[self._with_window[0]])
        missing = max(self.capacity.pages_of(start + count) - have, 0)
        available = max(self.pool.num_available - spare, 0)
        room = min(pages.reserved + available, self.pool.num_free)
        added = min(missing, room // len(self._with_window))
        for group in self._with_window:
            pages.tables[group] += self.pool.allocate(added, group)
        self._update_reserved(sequence)
        return min(count, (have + added) * self._page_size - start)

    def end_prefill(self, sequence: Sequence) -> None:
        """All its known tokens are scheduled: nothing is reserved for it any more."""
        sequence.pages.quota = 0
        self._update_reserved(sequence)

    def _still_reserved(self, pages: SequencePages, known: int) -> int:
        """Of the quota, what is not held and may be needed until all known tokens are computed."""
        if not pages.quota:
            return 0
        to_come = self.capacity.pages_of(known) * len(self._with_window)
        to_come -= sum(len(pages.tables[group]) for group in self._with_window)
        return max(min(pages.quota - pages.num_held_in(self._with_window), to_come), 0)

    def _update_reserved(self, sequence: Sequence) -> None:
        pages = sequence.pages
        reserved = self._still_reserved(pages, len(sequence.tokens))
        if reserved < pages.reserved:
            self.pool.num_releases += 1
        self.pool.num_reserved += reserved - pages.reserved
        pages.reserved = reserved

    # Release.

    def release_behind_window(self, sequence: Sequence, position: int) -> None:
        """Free the pages that no query at `position` or later sees.

        All rows before have been committed, and no later one begins before `position`.
        """
        pages, freed = sequence.pages, False
        for group in self._with_window:
            table, first = pages.tables[group], pages.firsts[group]
            seen = first_seen_page(position, self._windows[group], self._page_size)
            end = min(seen, len(table))
            if end > first:
                self.pool.release(table[first:end], oldest_first=True)
                table[first:end] = [NO_PAGE] * (end - first)
                pages.firsts[group] = end
                freed = True
        if freed and pages.quota:
            self._update_reserved(sequence)

    def release_all(self, sequence: Sequence) -> None:
        """Free all pages: first those without a window, so that windows are cached longest."""
        pages = sequence.pages
        self.pool.num_reserved -= pages.reserved
        for window, held in zip(self._windows, pages.held_by_group(), strict=True):
            self.pool.release(held, oldest_first=bool(window))
        sequence.pages = self.empty()

    # The prefix cache.

    def cache_page(self, sequence: Sequence, index: int) -> None:
        """Let prefixes hit the page of this index in each group; it is full and written."""
        page_hash = sequence.hashes[index]
        for group, table in enumerate(sequence.pages.tables):
            page = table[index]
            if page != NO_PAGE:
                self.pool.cache_page(page, page_hash, group)

    def evict(self, sequence: Sequence) -> None:
        """Let no prefix hit the pages of a sequence, nor those that it has had."""
        for group in range(self.num_groups):
            found = [self.pool.find(group, page_hash) for page_hash in sequence.hashes]
            self.pool.evict(page for page in found if page is not None)
