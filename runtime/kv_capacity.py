"""KVCapacity: how many KV pages a sequence needs, by the windows of the groups of layers.

A group without a window holds every position of a sequence, one with a window the last ones:
those that the next query sees, and those of the rows in flight.  Each group has its own pages.
"""

from __future__ import annotations

from msgspec import Struct

# Prompt tokens of a chunk whose pages an admitted sequence can count on in groups with a window,
# however short pages are; with fewer a step would mostly read the weights.  At most a quarter of
# the largest step.
RESERVED_CHUNK_TOKENS = 256


class KVCapacity(Struct, frozen=True):
    """page_size  tokens of a page
    windows       of each group, in positions; 0: all
    row_tokens    of a decode row, at most
    chunk_tokens  of a chunk of a prompt, that always find pages in groups with a window
    """

    page_size: int
    windows: tuple[int, ...] = (0,)
    row_tokens: int = 1
    chunk_tokens: int = RESERVED_CHUNK_TOKENS

    @classmethod
    def of(
        cls, page_size: int, windows: tuple[int, ...], row_tokens: int, max_batched_tokens: int
    ) -> KVCapacity:
        chunk_tokens = max(2 * row_tokens, min(RESERVED_CHUNK_TOKENS, max_batched_tokens // 4))
        return cls(page_size, windows, row_tokens, chunk_tokens)

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    def pages_of(self, length: int) -> int:
        """Pages that hold so many positions, in one group."""
        return -(-length // self.page_size)

    def decode_pages(self, window: int, length: int) -> int:
        """Pages that a decoding sequence of so many positions holds in a group, at most.

        Pages behind the window are freed when a page is full.  Until then the window reaches over
        ceil(window / page_size) pages before the newest full one, and the row in flight and the
        next one over those after it.
        """
        pages = self.pages_of(length)
        if not window:
            return pages
        return min(pages, self.pages_of(window) + 2 + (2 * self.row_tokens - 2) // self.page_size)

    def prefill_pages(self, window: int, length: int) -> int:
        """Pages that a sequence of so many known tokens can count on in a group while its prompt is
        computed: its window and a chunk."""
        pages = self.pages_of(length)
        if not window:
            return pages
        reach = (window + self.chunk_tokens + self.page_size - 2) // self.page_size + 1
        return min(pages, max(reach, self.decode_pages(window, length)))

    def held(self, length: int) -> int:
        """Pages of all groups that a decoding sequence of so many positions holds, at most."""
        return sum(self.decode_pages(window, length) for window in self.windows)

    def needed(self, length: int) -> int:
        """Pages that have to exist for a request of so many positions."""
        return sum(self.prefill_pages(window, length) for window in self.windows)

    def longest(self, num_pages: int, most: int) -> int:
        """The length of the longest request, up to `most`, that so many pages can serve."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle) <= num_pages else (low, middle - 1)
        return low

    def requests(self, num_pages: int, length: int) -> float:
        """How many decoding sequences of this length so many pages hold."""
        if not self.has_windows:  # as if the last page of a sequence were full
            return num_pages // len(self.windows) * self.page_size / length
        return num_pages / self.held(length)

    def tokens(self, num_pages: int, length: int) -> int:
        """Tokens in decoding sequences of this length that so many pages hold."""
        return round(self.requests(num_pages, length) * length)
