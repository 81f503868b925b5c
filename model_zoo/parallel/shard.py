"""Shard: which of the ranks that share a model this one is, and what it has of a layer.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# outputs  each rank computes some of a layer's outputs (column-parallel in Megatron's words)
# inputs   each rank multiplies some of its inputs, and the products are added (row-parallel)
Axis = Literal["outputs", "inputs"]
VOCAB_MULTIPLES = (128, 64, 1)  # of a rank's rows of the vocabulary: the first that leaves no rank
#                                 without any; blocks of quantized heads are not cut by the first


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one axis of a checkpoint's tensor.

    whole   the axis in the checkpoint
    ranges  (begin, end) of those that the rank has, in the order in which it has them
    """

    axis: Axis
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def own(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Shard:
    """kv_copies  ranks that have the same KV heads, where there are more ranks than heads"""

    rank: int = 0
    size: int = 1
    kv_copies: int = 1

    def part(self, axis: Axis, blocks: Sequence[int], *, copies: int = 1) -> Part | None:
        """The part of an axis that consists of blocks, each of which is divided evenly.

        blocks: what this rank has of each; copies: ranks that have the same.  None: it has all
        """
        if self.size == 1:
            return None
        count, index = self.size // copies, self.rank // copies
        ranges: list[tuple[int, int]] = []
        first = 0
        for own in blocks:
            ranges.append((first + index * own, first + (index + 1) * own))
            first += own * count
        return Part(axis, first, tuple(ranges))

    def vocabulary(self, rows: int) -> tuple[Part | None, int]:
        """The rank's rows of the embedding, and the rows that every rank has, padding included."""
        if self.size == 1:
            return None, rows
        each = -(-rows // self.size)
        padded = next(
            size
            for size in (-(-each // multiple) * multiple for multiple in VOCAB_MULTIPLES)
            if (self.size - 1) * size < rows or size == each
        )
        begin = min(self.rank * padded, rows)
        return Part("outputs", rows, ((begin, min(begin + padded, rows)),)), padded


WHOLE = Shard()  # of a model that is on one device
