"""PagePool: allocates KV pages, counts their references, and is the prefix cache.

The hash of a full page covers its tokens and everything before them, so a chain of hashes finds a
cached prefix: no tree, no eviction pass.  A free page keeps its content and its hash until it is
allocated again, the least recently released first.  A page belongs to one group of layers at a
time, and each group finds its own pages by the hashes that all groups share.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b

from runtime.messages import PromptImage

PageHash = bytes  # 16 bytes: equal digests mean equal tokens, so nothing is compared afterwards
DIGEST_BYTES = 16
TOKEN_BYTES = 4


def chain_root(salt: bytes) -> PageHash:
    """The parent hash of the first page.  Different salts have no page hash in common.

    `person` separates roots from page hashes: no salt can imitate a chain of tokens.
    """
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"wavefill-root").digest()


def page_hash(parent: PageHash, content: bytes) -> PageHash:
    """The hash of a page that holds `content`, TOKEN_BYTES a token, after the page `parent`.

    Of a page that has tokens of images, `content` ends with what says which they are.
    """
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()


def images_between(images: Sequence[PromptImage], first: int, last: int) -> bytes:
    """Place and digest of the images that have tokens from place `first` up to `last`.

    It tells apart tokens that are the same for all images.  images: in the order of the prompt
    """
    found = bytearray()
    for place in range(bisect_right(images, first, key=_end), len(images)):
        image = images[place]
        if image.start >= last:
            break
        found += image.start.to_bytes(8, "little") + image.digest
    return bytes(found)


def _end(image: PromptImage) -> int:
    return image.start + image.num_tokens


def extend_chain(
    hashes: list[PageHash],
    root: PageHash,
    tokens: list[int],
    page_size: int,
    images_in: Callable[[int], bytes] = lambda page: b"",
) -> None:
    """Append the hashes of the full pages of `tokens` that `hashes` does not have yet.

    images_in: what a page, by its index, holds besides its tokens
    """
    done = len(hashes)
    full = len(tokens) // page_size
    if full <= done:
        return
    content = array("i", tokens[done * page_size : full * page_size]).tobytes()
    parent = hashes[-1] if hashes else root
    page_bytes = page_size * TOKEN_BYTES
    for offset in range(0, len(content), page_bytes):
        more = images_in(len(hashes))
        parent = page_hash(parent, content[offset : offset + page_bytes] + more)
        hashes.append(parent)


class PagePool:
    def __init__(self, num_pages: int, num_groups: int = 1) -> None:
        """num_groups: of layers, that each have pages of their own."""
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_reserved = 0  # free pages that sequences which prefill can count on
        self.num_releases = 0  # a caller that waits for pages retries once it has changed
        self.used_by_group = [0] * num_groups  # pages with a reference
        self.cached_by_group = [0] * num_groups  # pages without one that find() may find
        self._group_of = [0] * num_pages  # since it was allocated last
        self._references = [0] * num_pages
        # In the order of allocation: empty pages, then the least recently released.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of: list[dict[PageHash, int]] = [{} for _ in range(num_groups)]
        self._hash_of: dict[int, tuple[int, PageHash]] = {}  # group and hash
        self._recorded_group = -1  # none
        self._changes: dict[PageHash, bool] = {}

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_available(self) -> int:
        """Free pages that are not reserved."""
        return self.num_free - self.num_reserved

    @property
    def groups(self) -> Sequence[int]:
        """Of each page, the group that it was last allocated for."""
        return self._group_of

    @property
    def cached_pages(self) -> Collection[int]:
        """The pages that find() may find, free ones included."""
        return self._hash_of.keys()

    def find(self, group: int, page_hash: PageHash) -> int | None:
        """The cached page of a group with this hash; no reference is added."""
        return self._page_of[group].get(page_hash)

    def found(self, group: int, hashes: Iterable[PageHash]) -> list[int]:
        """The cached pages with these hashes, all of which are cached."""
        return list(map(self._page_of[group].__getitem__, hashes))

    def lookup(self, hashes: Iterable[PageHash], group: int = 0) -> list[int]:
        """The pages of the longest cached prefix of the chain in a group; no reference is added."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of[group].get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_free(self, pages: Iterable[int]) -> int:
        """How many of `pages` are free: sharing them lowers num_free by so many."""
        references = self._references
        return sum(references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which keeps its content."""
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
                self.num_free -= 1
                self.used_by_group[self._group_of[page]] += 1
                self.cached_by_group[self._group_of[page]] -= page in self._hash_of
            self._references[page] += 1

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """`count` pages for a group to write to, evicted from the cache.

        The caller has checked num_free.
        """
        pages: list[int] = []
        self.num_free -= count
        self.used_by_group[group] += count
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            if page in self._hash_of:
                self._forget(page)
            self._references[page] = 1
            self._group_of[page] = group
            pages.append(page)
        return pages

    def release(self, pages: list[int], *, oldest_first: bool = False) -> None:
        """Drop a reference to each page.

        The end of a chain cannot be hit without its beginning, hence it is reused first.
        oldest_first: its beginning is, because a window does not need it.
        """
        self.num_releases += 1
        for page in pages if oldest_first else reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released twice"
            if self._references[page] == 0:
                self.num_free += 1
                self.used_by_group[self._group_of[page]] -= 1
                self._free[page] = None
                if page in self._hash_of:
                    self.cached_by_group[self._group_of[page]] += 1
                else:
                    self._free.move_to_end(page, last=False)

    def cache_page(self, page: int, page_hash: PageHash, group: int = 0) -> None:
        """Let find() find the page of a group, which is full and written.

        If two sequences computed the same content at the same time, the first page is kept.
        """
        assert self._references[page] > 0, f"page {page} is not in use"
        if page_hash not in self._page_of[group] and page not in self._hash_of:
            self._page_of[group][page_hash] = page
            self._hash_of[page] = group, page_hash
            if group == self._recorded_group:
                self._changes[page_hash] = True

    def evict(self, pages: Iterable[int]) -> None:
        """Let find() no longer find these pages: their content may be invalid."""
        for page in pages:
            if page in self._hash_of:
                self._forget(page)

    def _forget(self, page: int) -> None:
        group, page_hash = self._hash_of.pop(page)
        del self._page_of[group][page_hash]
        self.cached_by_group[group] -= self._references[page] == 0
        if group == self._recorded_group:
            self._changes[page_hash] = False

    def record_changes(self, group: int) -> dict[PageHash, bool]:
        """From now on, which hashes of a group come and go: whether they are cached now.

        The caller clears what it has read.
        """
        self._recorded_group = group
        return self._changes

    def hashes(self, group: int) -> Collection[PageHash]:
        """Those of the group's pages that find() may find."""
        return self._page_of[group].keys()

    def check_integrity(self, holders: Iterable[list[int]] = ()) -> None:
        """Assert that the records agree with each other and with the page lists of all holders."""
        counted = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a page occurs twice in {pages}"
            for page in pages:
                counted[page] += 1
        assert counted == self._references, f"held {counted}, recorded {self._references}"
        unused = {page for page, count in enumerate(self._references) if count == 0}
        assert unused == set(self._free), "a page is free if and only if it has no reference"
        assert len(unused) == self.num_free
        used = [self._group_of[page] for page, count in enumerate(self._references) if count]
        assert self.used_by_group == [used.count(group) for group in range(len(self._page_of))]
        cached = [self._group_of[page] for page in unused & self._hash_of.keys()]
        assert self.cached_by_group == [cached.count(group) for group in range(len(self._page_of))]
        assert all(self._group_of[page] == group for page, (group, _) in self._hash_of.items())
        inverse = {
            page: (group, page_hash)
            for group, pages in enumerate(self._page_of)
            for page_hash, page in pages.items()
        }
        assert len(inverse) == sum(map(len, self._page_of)), "a page belongs to two groups"
        assert inverse == self._hash_of, "every cached page has one hash, and every hash one page"
