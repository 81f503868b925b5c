"""StateSnapshots: copies of recurrent states in host memory, from which later requests continue.

A state is of no use to a prefix that is shorter than what it has read, and it cannot be undone.  So
a prefix is a hit only where a snapshot of the state was taken: in prompts at the last border of
pages, and every `every` tokens before; and where an answer ends or a sequence is preempted.  There
the last page may be in part full: it is cached under a hash of its tokens, and a sequence that
hits it gets a copy.

At the end of a row the sequence's own state is copied.  Within a row the device stores the state in
a spare one as well, which is another's again with the next batch.

The host decides which snapshot is where; the device copies when it runs the next batch, before
anything else.  Which one is overwritten is in eviction.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from runtime.config import ResolvedConfig
from runtime.scheduler.kv_cache.page_pool import PageHash, PagePool, page_hash
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.eviction import EvictionOrder
from runtime.scheduler.states.state_slots import Copies

# Of fewer tokens since the last snapshot none is taken: they are computed about as fast as a state
# is copied.
LEAST_TOKENS = 256
ALIGNMENT = 64  # positions in prompts are multiples of it: kernels compute so many tokens at once


class Key(NamedTuple):
    """The hash of the last full page before a position, and the tokens after that page.

    If some of these are of images, the hash is that of the images, too.
    """

    parent: PageHash
    tail: bytes


class SnapshotHit(NamedTuple):
    """A prefix of `position` tokens: full pages and perhaps one more, and its snapshot."""

    position: int
    place: int
    tail_page: int | None


class Unread(NamedTuple):
    """A snapshot after a row of a step whose results have not been read.

    `page` has the end of its prefix, and is to be cached by `name`.
    """

    step: int  # which, of all that were scheduled
    slot: int  # of the row
    key: Key
    place: int
    position: int
    page: int
    name: PageHash


class StateSnapshots:
    """Of `resolved.num_snapshots` 0, every method does nothing."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self.count, self._every = resolved.num_snapshots, resolved.snapshot_every
        self._page_size = resolved.page_size
        self._unit = max(resolved.page_size, min(ALIGNMENT, self._every))
        self._least = min(LEAST_TOKENS, self._every)
        self._free = list(range(self.count - 1, -1, -1))
        self._index_of: dict[Key, int] = {}
        self._order: EvictionOrder[Key] = EvictionOrder()  # of the same keys
        self._tails: dict[PageHash, set[bytes]] = {}
        self.unread: list[Unread] = []  # of sequences that have ended, or were preempted
        self._saves: list[tuple[int, int]] = []  # (state, snapshot) of the next batch
        self._loads: list[tuple[int, int]] = []  # (snapshot, state)
        self._page_copies: list[tuple[int, int]] = []  # (from, to)

    @property
    def num_used(self) -> int:
        return len(self._index_of)

    # Taking them.

    def next_positions(self, sequence: Sequence) -> tuple[int, int]:
        """Where the next snapshots are due in the prefill of a sequence; 0: nowhere."""
        if not self.count or not sequence.may_use_prefix_cache:
            return 0, 0
        first = self._position(sequence, sequence.num_computed_tokens, sequence.snapshot_at)
        return first, self._position(sequence, first, first) if first else 0

    def _position(self, sequence: Sequence, start: int, snapshot_at: int) -> int:
        end = len(sequence.tokens) - 1
        if end < sequence.prompt_len:
            # Where the answer begins, the next prompt of a conversation may differ: chat templates
            # that leave reasoning out of the history open it there.
            end = min(end, sequence.prompt_len - sequence.request.generation_prompt_len)
        last = end // self._unit * self._unit
        regular = (start // self._every + 1) * self._every
        if regular <= last:
            return regular
        return last if last > start and last - snapshot_at >= self._least else 0

    def reserve(self, sequence: Sequence, position: int) -> int | None:
        """A row with `position` is scheduled, where a snapshot is due.  Returns its place."""
        index, sequence.snapshot_at = self._take(), position
        if index is not None:
            sequence.pending_snapshots.append((position, index))
        return index

    def save(self, state: int, index: int) -> None:
        """The state that this step leaves in `state` is copied before the next step."""
        self._saves.append((state, index))

    def publish(self, sequence: Sequence, end: int) -> None:
        """The row that ends at `end` has been read, and is right."""
        for pending in list(sequence.pending_snapshots):
            position, index = pending
            if position <= end:
                sequence.pending_snapshots.remove(pending)
                self._put(self._key(sequence, position), index, position)

    def keep(
        self, sequence: Sequence, state: int, position: int, pool: PagePool, step: int | None
    ) -> None:
        """A decoding sequence ends, or is preempted, with its state and KV at `position`.

        step: the one in flight, if it has a row that ends there; until it is read, the snapshot is
        not found, and no other sequence gets the page
        """
        table, size = sequence.pages.tables[0], self._page_size
        if not self.count or not sequence.may_use_prefix_cache:
            return
        if position - sequence.snapshot_at < self._least or not position <= len(sequence.tokens):
            return
        key = self._key(sequence, position)
        index = None if key in self._index_of else self._take()
        if index is None:
            return
        page, name = table[(position - 1) // size], key.parent
        if key.tail:
            name = page_hash(key.parent, key.tail)
        self._saves.append((state, index))
        if step is not None:
            pool.share([page])
            self.unread.append(Unread(step, sequence.slot, key, index, position, page, name))
            return
        pool.cache_page(page, name)
        self._put(key, index, position)

    def read(self, step: int, failed_slots: Collection[int], pool: PagePool) -> None:
        """The results of a step have been read: what its rows left is right, or is forgotten."""
        unread, self.unread = self.unread, []
        for one in unread:
            if one.step > step:
                self.unread.append(one)
                continue
            if one.slot in failed_slots:
                self._free.append(one.place)
            else:
                pool.cache_page(one.page, one.name)
                self._put(one.key, one.place, one.position)
            pool.release([one.page])

    def distrust(self, sequence: Sequence) -> None:
        """Forget all snapshots of beginnings of a sequence: one of them may hold no numbers."""
        loading = {index for index, _ in self._loads}
        for pages in range(len(sequence.hashes) + 1 if self.count else 0):
            for key in list(self._keys_behind(sequence, pages)):
                if self._index_of[key] not in loading:
                    self._order.remove(key)
                    self._free.append(self._forget(key))

    def held_pages(self) -> list[list[int]]:
        """Those that wait for the results of a step."""
        return [[one.page] for one in self.unread]

    def drop(self, sequence: Sequence) -> None:
        """The sequence loses its slot: what was to become a snapshot does not."""
        self._free += [index for _, index in sequence.pending_snapshots]
        sequence.pending_snapshots.clear()

    # Using them.

    def find(self, sequence: Sequence, num_pages: int, pool: PagePool) -> SnapshotHit | None:
        """The longest prefix with a snapshot, within num_pages cached pages and one more.

        At least one token of the sequence is left to compute.
        """
        tokens, size = sequence.tokens, self._page_size
        for pages in range(num_pages, -1, -1):
            first, best = pages * size, None
            for key in self._keys_behind(sequence, pages):
                parent, tail = key
                end = first + len(tail) // 4
                if end >= len(tokens) or (best is not None and len(tail) < len(best.tail)):
                    continue
                if _bytes(tokens[first:end]) != tail or self._parent(sequence, end) != parent:
                    continue
                if not tail or pool.find(0, page_hash(parent, tail)) is not None:
                    best = key
            if best is not None:
                page = pool.find(0, page_hash(*best)) if best.tail else None
                return SnapshotHit(first + len(best.tail) // 4, self._index_of[best], page)
        return None

    def load(self, hit: SnapshotHit, state: int, sequence: Sequence) -> None:
        """A sequence continues from a hit, with this state and the pages that it has now."""
        self._loads.append((hit.place, state))
        if hit.tail_page is not None:
            own = sequence.pages.tables[0][hit.position // self._page_size]
            self._page_copies.append((hit.tail_page, own))
        sequence.snapshot_at = hit.position
        self._order.use(self._key(sequence, hit.position), hit.position)

    def take_copies(self) -> tuple[Copies, Copies, Copies]:
        """What the next batch saves, (state, snapshot), what it then loads, (snapshot, state), and
        the pages that it copies.  All of it comes before the batch writes anything else, so that
        a page or state may be another's by then."""
        queues = self._saves, self._loads, self._page_copies
        saves, loads, pages = map(tuple, queues)
        for queue in queues:
            queue.clear()
        return saves, loads, pages

    # The table.

    def _key(self, sequence: Sequence, position: int) -> Key:
        full = position // self._page_size
        sequence.hash_pages(self._page_size)
        tail = _bytes(sequence.tokens[full * self._page_size : position])
        return Key(self._parent(sequence, position), tail)

    def _parent(self, sequence: Sequence, position: int) -> PageHash:
        """Key.parent of a snapshot at `position`: the hash of the full pages before it, with the
        images that have tokens in its tail."""
        full = position // self._page_size
        parent = sequence.hashes[full - 1] if full else sequence.root
        if position > full * self._page_size and sequence.request.images:
            images = sequence.images_between(full * self._page_size, position)
            return page_hash(parent, images) if images else parent
        return parent

    def _keys_behind(self, sequence: Sequence, pages: int) -> Iterator[Key]:
        """The snapshots that may be of a prefix that ends within the page behind so many."""
        first = pages * self._page_size
        # Another image begins to count behind its first token.
        ends = [first, first + 1, *(image.start + 1 for image in sequence.request.images)]
        inside = [end for end in ends if first <= end < first + self._page_size]
        for parent in dict.fromkeys(self._parent(sequence, end) for end in inside):
            yield from (Key(parent, tail) for tail in self._tails.get(parent, ()))

    def _take(self) -> int | None:
        """A place for a snapshot; None if all are to be loaded."""
        if self._free:
            return self._free.pop()
        loading = {index for index, _ in self._loads}
        key = self._order.evict(lambda key: self._index_of[key] not in loading)
        return None if key is None else self._forget(key)

    def _put(self, key: Key, index: int, position: int) -> None:
        self._order.use(key, position)
        if key in self._index_of:  # another sequence has computed the same
            self._free.append(index)
            return
        self._index_of[key] = index
        self._tails.setdefault(key.parent, set()).add(key.tail)

    def _forget(self, key: Key) -> int:
        tails = self._tails[key.parent]
        tails.remove(key.tail)
        if not tails:
            del self._tails[key.parent]
        return self._index_of.pop(key)

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that every place is free, to be filled, or has one name."""
        pending = [index for one in running for _, index in one.pending_snapshots]
        pending += [one.place for one in self.unread]
        places = [*self._free, *self._index_of.values(), *pending]
        assert sorted(places) == list(range(self.count))
        found = {Key(parent, tail) for parent, tails in self._tails.items() for tail in tails}
        assert found == set(self._index_of) and len(found) == len(self._order)


def _bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()
