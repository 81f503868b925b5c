"""SequencePages: the KV pages of one sequence, a table for each group of layers."""

from __future__ import annotations

from collections.abc import Iterator

NO_PAGE = -1  # in a table: a page behind the window of the group, freed or never held


class SequencePages:
    """tables[group][i] holds positions i * page_size .. (i + 1) * page_size - 1 of the sequence.

    firsts[group]  the first index that is held; NO_PAGE stands before it, and nowhere else
    quota          pages that groups with a window can count on together, while it prefills
    reserved       those of them that are still to be allocated
    num_sent       entries of each table that the device has, until the sequence decodes: from then
                   on each entry is sent with the row that needs it
    """

    __slots__ = ("firsts", "num_sent", "quota", "reserved", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.firsts = [0] * num_groups
        self.quota = self.reserved = self.num_sent = 0

    def held(self) -> list[int]:
        """The pages of all groups."""
        if len(self.tables) == 1 and not self.firsts[0]:
            return self.tables[0]
        return [page for pages in self.held_by_group() for page in pages]

    def held_by_group(self) -> Iterator[list[int]]:
        for table, first in zip(self.tables, self.firsts, strict=True):
            yield table[first:] if first else table

    @property
    def num_held(self) -> int:
        return sum(map(len, self.tables)) - sum(self.firsts)

    def num_held_in(self, groups: list[int]) -> int:
        return sum(len(self.tables[group]) - self.firsts[group] for group in groups)

    def unsent(self, count: int) -> list[int]:
        """Entries num_sent .. count - 1 of the tables, those of all groups side by side; the device
        has them from now on."""
        first, self.num_sent = self.num_sent, max(count, self.num_sent)
        if len(self.tables) == 1:
            return self.tables[0][first:count]
        columns = zip(*(table[first:count] for table in self.tables), strict=True)
        return [page for pages in columns for page in pages]
