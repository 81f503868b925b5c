"""EvictionOrder: which snapshot is overwritten when a new one needs its place.

A flood of short chats must not push out the state behind 30,000 tokens of an agent that will be
back in a minute: the least recently used one may be the one that saves most.  So the snapshot with
the lowest priority goes, where

    priority = level + uses x tokens

`tokens` is the length of the prefix that it saves the computation of (all snapshots have the same
bytes, so this is the time saved for each byte), `uses` is one more than the requests that went on
from it, and `level`, taken when it was last used, is the priority of the snapshot that was
overwritten last.  The level only rises, so that what is not used any more falls behind.  This is
GreedyDual-Size-Frequency (Cherkasova 1998) with tokens as the cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)


class _Entry(NamedTuple):
    priority: int
    serial: int  # of the use; the older one of two equal priorities goes first
    tokens: int
    uses: int


class EvictionOrder(Generic[Name]):
    """Every method takes O(log n) for n snapshots."""

    def __init__(self) -> None:
        self._entries: dict[Name, _Entry] = {}
        self._heap: list[tuple[int, int, Name]] = []  # the entries, and some that were replaced
        self._level, self._serial = 0, 0

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, name: Name, tokens: int) -> None:
        """Add a snapshot of a prefix of so many tokens, or count a use of it."""
        uses = self._entries[name].uses + 1 if name in self._entries else 1
        self._serial += 1
        entry = _Entry(self._level + uses * tokens, self._serial, tokens, uses)
        self._entries[name] = entry
        heapq.heappush(self._heap, (entry.priority, entry.serial, name))
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [(each.priority, each.serial, n) for n, each in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, name: Name) -> None:
        del self._entries[name]

    def evict(self, may_go: Callable[[Name], bool]) -> Name | None:
        """Remove the one of the lowest priority among those that may go; None if there is none."""
        kept: list[tuple[int, int, Name]] = []
        found: Name | None = None
        while found is None and self._heap:
            priority, serial, name = first = heapq.heappop(self._heap)
            entry = self._entries.get(name)
            if entry is None or entry.serial != serial:
                continue  # it has been used since, or is gone
            if may_go(name):
                found, self._level = name, priority
                del self._entries[name]
            else:
                kept.append(first)
        for one in kept:
            heapq.heappush(self._heap, one)
        return found
