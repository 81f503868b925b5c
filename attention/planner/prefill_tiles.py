"""TilePlan: the work list of prefill: query tiles, and their KV range.

Rows with several query tokens are divided into tiles of block_m packed query rows: packed row r is
query token r // group, head r % group of one KV head, so that a group (GQA) shares each load of K
and V.  The list of tiles is in device memory, longest first, and is the same for every KV head;
grids depend on capacities only, so that a CUDA graph can replay any step.

Few tiles against a long KV would leave most SMs idle.  Then the KV is split as well, into splits of
one common length, the shortest with which all of them run at once; merge_tiles.py merges their
partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns of `items`.  TILE is the tile's index in its row; FIRST and END are KV positions: FIRST is
# a multiple of block_n, END too, or one past the last position that any query of the tile sees.
# PARTIAL is 1 if other items share the tile: each writes a partial result at its own index.
ROW, TILE, FIRST, END, Q_START, Q_LEN, KV_LEN, PARTIAL = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class TileSpec:
    """The parameters of a tile plan besides the rows' lengths."""

    kv_heads: int
    group: int  # query heads per KV head
    programs: int  # grid of the prefill kernel: SMs * CTAs per SM
    min_q_len: int = 2  # rows with fewer query tokens are left to the decode kernel
    window: int = 0  # sliding window in positions; 0: full attention
    block_m: int = 128  # packed query rows of a tile, a power of two
    block_n: int = 64  # KV positions of a block, a power of two; cuts are at multiples of it
    min_blocks: int = 4  # of a split, unless its tile has fewer

    @property
    def split_items(self) -> int:
        """Items per KV head that run at once: the maximum in a step whose tiles are split."""
        return max(self.programs // self.kv_heads, 1)

    @property
    def longest_key(self) -> int:
        """An upper bound of the blocks that any tile reads, within one."""
        if self.window == 0:
            return (1 << 31) - 1
        return -(-(self.window + -(-self.block_m // self.group)) // self.block_n)

    def capacity(self, max_tokens: int, max_rows: int) -> int:
        """Items that a step of at most max_tokens tokens in max_rows rows needs."""
        rows = min(max_rows, max_tokens // self.min_q_len)
        return max(max_tokens * self.group // self.block_m + rows, self.split_items)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """A tile plan in device memory, in buffers sized by capacity.

    items   [capacity, 8] int32      longest first; by row, tile and KV position where all of them
                                     run at once, the only case in which tiles are split
    merges  [split_items, 2] int32   (first item, number of items) of each split tile
    counts  [3] int32                items, merges, and KV positions that the rows see per KV head;
                                     entries of items and merges past their counts are junk
    queue   [1] int32                next item to take; 0 between launches
    partial_out  [split_items, kv_heads, block_m, head_dim] float32   normalized per split
    partial_lse  [split_items, kv_heads, block_m] float32             base 2; -inf: no key seen
    """

    spec: TileSpec
    items: Tensor
    merges: Tensor
    counts: Tensor
    queue: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @classmethod
    def allocate(
        cls,
        spec: TileSpec,
        *,
        max_tokens: int,
        max_rows: int,
        head_dim: int,
        device: torch.device,
    ) -> TilePlan:
        """Buffers for steps of at most max_tokens query tokens in max_rows rows."""
        splits = (spec.split_items, spec.kv_heads, spec.block_m)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            spec=spec,
            items=ints(spec.capacity(max_tokens, max_rows), COLUMNS),
            merges=ints(spec.split_items, 2),
            counts=ints(3),
            queue=ints(1),
            partial_out=torch.empty(*splits, head_dim, device=device),
            partial_lse=torch.empty(*splits, device=device),
        )
