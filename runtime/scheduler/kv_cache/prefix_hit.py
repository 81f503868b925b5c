"""The longest cached prefix that a sequence can continue from, over groups with windows."""

from __future__ import annotations

from runtime.scheduler.kv_cache.page_pool import PageHash, PagePool


def first_seen_page(position: int, window: int, page_size: int) -> int:
    """The first page of which a query at this position, or a later one, sees a position."""
    return max(0, position + 1 - window) // page_size if window else 0


def longest_hit(
    pool: PagePool, hashes: list[PageHash], windows: tuple[int, ...], page_size: int
) -> int:
    """The most pages of the chain that all groups have what the next position needs of.

    A group without a window needs all pages of the prefix, one with a window those that a query
    behind the prefix sees.  Each page is looked up once, however many lengths are tried.
    """
    length = len(hashes)
    for group, window in enumerate(windows):
        if not window:
            length = len(pool.lookup(hashes[:length], group))
    with_window = [(group, window) for group, window in enumerate(windows) if window]
    if not with_window:
        return length
    # Of each group, pages found[group] .. length - 1 are cached.
    found = [length] * len(windows)
    while length:
        missing = -1
        for group, window in with_window:
            first = first_seen_page(length * page_size, window, page_size)
            page = min(found[group], length)
            while page > first and pool.find(group, hashes[page - 1]) is not None:
                page -= 1
            found[group] = page
            if page > first:
                missing = page - 1
                break
        if missing < 0:
            return length
        length = missing  # no longer prefix does without this page
    return 0
