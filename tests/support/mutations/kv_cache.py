"""Mistakes with KV pages: which are free, shared, cached, sent, and what their hashes cover."""

from __future__ import annotations

from collections.abc import Callable

import runtime.scheduler.kv_cache.kv_pages
import runtime.scheduler.sequence
from runtime.scheduler.commit import Committer
from runtime.scheduler.kv_cache.kv_pages import Claim, KVPages
from runtime.scheduler.kv_cache.page_pool import PagePool
from runtime.scheduler.kv_cache.sequence_pages import SequencePages
from runtime.scheduler.prefill import PrefillRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence

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
    def add(self: PrefillRows, sequence: Sequence, count: int) -> bool:
        result = true(self, sequence, count)
        table = TABLES[-1]
        hashes = sequence.hash_pages(table.resolved.page_size)
        for group, pages in enumerate(sequence.pages.tables):
            for page, page_hash in zip(pages, hashes, strict=False):
                if page >= 0:
                    table.pool.cache_page(page, page_hash, group)
        return result

    return add


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


def pages_never_reported(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, count: true(self, count)[:0]


def head_waits_for_ever(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: PagePool, pages: list[int], *, oldest_first: bool = False) -> None:
        true(self, pages)
        self.num_releases -= 1

    return release


def means_without_their_prefix(true: Callable[..., bool]) -> property:
    return property(lambda self: self.request.params.prompt_logprobs is None)


def page_named_before_its_last_token_is_computed(true: Callable[..., None]) -> Callable[..., None]:
    def cache_pages(self: Committer, sequence: Sequence, start: int, end: int) -> None:
        room = len(sequence.pages.tables[0]) * self._page_size
        true(self, sequence, start, min(end + 1, len(sequence.tokens), max(room, end)))

    return cache_pages


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (PagePool, "release", released_twice),
    (PagePool, "release", never_released),
    (PagePool, "release", head_waits_for_ever),
    (PagePool, "share", shared_without_a_reference),
    (PagePool, "allocate", remembered_after_it_was_taken),
    (runtime.scheduler.sequence, "extend_chain", chain_without_parent),
    (runtime.scheduler.sequence, "chain_root", salt_ignored),
    (Sequence, "may_use_prefix_cache", means_without_their_prefix),
    (PrefillRows, "add", hit_of_a_page_not_yet_written),
    (SequencePages, "unsent", pages_never_reported),
    (SequencePages, "unsent", tables_sent_in_the_wrong_order),
    (KVPages, "claim", whole_prompt_looked_up),
    (KVPages, "release_behind_window", freed_a_position_too_early),
    (KVPages, "release_behind_window", never_freed_behind_a_window),
    (runtime.scheduler.kv_cache.kv_pages, "first_seen_page", windows_begin_a_position_late),
    (PagePool, "found", pages_of_another_group_hit),
    (Committer, "_cache_pages", page_named_before_its_last_token_is_computed),
]
