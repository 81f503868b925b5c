"""TilePlan: which tile of queries attends to which part of the KV, for prefill.

Rows that feed several tokens are cut into tiles of block_m packed query rows: packed row r of a row
of the step is query token r // group, head r % group of one KV head, so that a group shares each
load of K and V.  The list of tiles lives in device memory, longest first, and is the same for every
KV head; the kernels' grids depend on capacities only, so that a graph can replay any step.

Few tiles against a long KV would leave most of the device idle.  Then the KV is cut as well, into
pieces of one common length, the shortest with which all pieces run at once; merge_tiles.py merges
their partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.planner.split_plan import Int32Array

# Columns of `items`.  TILE counts the tiles of a row; FIRST and END are KV positions: FIRST is a
# multiple of block_n, END is one or the last position that any query of the tile sees, plus one.
# PARTIAL is 1 if other items share the tile: each leaves a partial result in the slot of its index.
ROW, TILE, FIRST, END, Q_START, Q_LEN, KV_LEN, PARTIAL = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class TileSpec:
    """What a tile plan depends on besides the rows' lengths."""

    kv_heads: int
    group: int  # query heads a KV head
    programs: int  # prefill programs that run at once: SMs * resident programs an SM
    min_q_len: int = 2  # rows that feed fewer tokens are left out: the decode kernel serves them
    window: int = 0  # a query sees so many positions up to its own; 0: all
    block_m: int = 128  # packed query rows of a tile, a power of two
    block_n: int = 64  # KV positions of a block, a power of two; cuts are at multiples of it
    min_blocks: int = 4  # a piece is at least so many blocks, if its tile is

    @property
    def split_items(self) -> int:
        """Items that run at once for every KV head: the most that a step with cut tiles has."""
        return max(self.programs // self.kv_heads, 1)

    @property
    def longest_key(self) -> int:
        """Blocks that any tile visits at most, give or take one."""
        if self.window == 0:
            return (1 << 31) - 1
        return -(-(self.window + -(-self.block_m // self.group)) // self.block_n)

    def capacity(self, max_tokens: int, max_rows: int) -> int:
        """Items that any step of so many tokens and rows needs."""
        rows = min(max_rows, max_tokens // self.min_q_len)
        return max(max_tokens * self.group // self.block_m + rows, self.split_items)


@dataclass(frozen=True, slots=True)
class HostTiles:
    """A tile plan in host memory, for tests; `TilePlan` holds the same integers.

    items   [n, 8] int32  longest first; by row, tile and KV position where all of them run at once,
                          which is where tiles may be cut
    merges  [m, 2] int32  (first item, items) of each tile that is cut
    tokens  KV positions that the rows see, all together, for each KV head
    """

    items: Int32Array
    merges: Int32Array
    tokens: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """A tile plan in device memory, in buffers whose sizes depend on no length.

    items   [capacity, 8] int32      as HostTiles; entries past counts[0] are junk
    merges  [split_items, 2] int32   as HostTiles; entries past counts[1] are junk
    counts  [3] int32                items, merges and tokens
    queue   [1] int32                next item to take; 0 between uses
    partial_out  [split_items, kv_heads, block_m, head_dim] float32   a piece's softmax applied
    partial_lse  [split_items, kv_heads, block_m] float32             base 2; -inf: nothing seen
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

    def load(self, plan: HostTiles) -> None:
        """Take over a plan made on the host; for tests and benchmarks."""
        num_items, num_merges = len(plan.items), len(plan.merges)
        assert num_items <= len(self.items) and num_merges <= len(self.merges)
        self.items[:num_items] = torch.from_numpy(plan.items)
        self.merges[:num_merges] = torch.from_numpy(plan.merges)
        self.counts.copy_(torch.tensor([num_items, num_merges, plan.tokens], dtype=torch.int32))
        self.queue.zero_()


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a step, by row and tile."""

    row: Int32Array  # [T]
    tile: Int32Array
    q_start: Int32Array
    q_len: Int32Array
    kv_len: Int32Array
    first_block: Int32Array  # blocks before it are outside every query's window
    end: Int32Array  # KV position past the last that any query sees; 0: an empty row
    blocks: Int32Array  # from first_block to end


def tiles_of(cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: TileSpec) -> Tiles:
    """cu_seqlens_q [B + 1], cache_seqlens [B] -> the tiles that the prefill kernel serves."""
    q_lens = np.diff(cu_seqlens_q)
    served = np.flatnonzero((q_lens >= spec.min_q_len) & (q_lens >= 1))
    counts = -(-q_lens[served] * spec.group // spec.block_m)
    row = np.repeat(served, counts)
    tile = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    q_len, kv_len = q_lens[row], cache_seqlens[row]
    first_query = tile * spec.block_m // spec.group
    last_query = np.minimum(((tile + 1) * spec.block_m - 1) // spec.group, q_len - 1)
    position = kv_len - q_len  # of the row's first query
    end = np.maximum(position + last_query + 1, 0)
    first = np.zeros_like(end)
    if spec.window:
        first = np.maximum(position + first_query + 1 - spec.window, 0) // spec.block_n
    blocks = -(-end // spec.block_n) - first
    columns = (row, tile, cu_seqlens_q[row], q_len, kv_len, first, end, blocks)
    return Tiles(*(column.astype(np.int32) for column in columns))


def plan_tiles(cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: TileSpec) -> HostTiles:
    """The step's tiles, longest first; if they are fewer than run at once, cut along KV.

    Longest by the blocks up to the tile's end, but no more than a window holds: like the blocks it
    visits, give or take one, and never less in a later tile of a row, which device_tiles.py needs.
    """
    tiles = tiles_of(cu_seqlens_q, cache_seqlens, spec)
    tokens = _tokens(tiles, spec)
    if len(tiles.row) >= spec.split_items:
        key = np.minimum(-(-tiles.end // spec.block_n), spec.longest_key)
        order = np.argsort(-key, kind="stable")
        items = _items(tiles, order, np.zeros_like(order), np.ones_like(order), spec)
        return HostTiles(items, np.zeros((0, 2), dtype=np.int32), tokens)
    splits = _splits(tiles.blocks, spec)
    first = np.cumsum(splits) - splits
    index = np.repeat(np.arange(len(splits)), splits)
    split = np.arange(len(index)) - first[index]
    merges = np.stack([first, splits], axis=1)[splits > 1].astype(np.int32)
    return HostTiles(_items(tiles, index, split, splits[index], spec), merges, tokens)


def _tokens(tiles: Tiles, spec: TileSpec) -> int:
    """KV positions that the rows see."""
    first_tiles = tiles.tile == 0
    q_len, kv_len = tiles.q_len[first_tiles], tiles.kv_len[first_tiles]
    seen = np.minimum(kv_len, q_len - 1 + spec.window) if spec.window else kv_len
    return int(seen.sum())


def _splits(blocks: Int32Array, spec: TileSpec) -> NDArray[np.int64]:
    """[T] pieces of each tile, at least one, together at most spec.split_items.

    Pieces are as short as those of the longest tile cut into k.  The largest k is found by
    bisection: a larger one never gives fewer pieces.
    """
    longest = int(blocks.max(initial=0))

    def splits(k: int) -> NDArray[np.int64]:
        size = max(-(-longest // k), spec.min_blocks)
        return np.maximum(-(-blocks.astype(np.int64) // size), 1)

    low, high = 1, spec.split_items
    while low < high:
        middle = (low + high + 1) // 2
        if splits(middle).sum() <= spec.split_items:
            low = middle
        else:
            high = middle - 1
    return splits(low)


def _items(
    tiles: Tiles,
    index: NDArray[np.int64],
    split: NDArray[np.int64],
    splits: NDArray[np.int64],
    spec: TileSpec,
) -> Int32Array:
    """Items for piece `piece` of `pieces` equal ones of tiles[index]."""
    blocks, first_block = tiles.blocks[index], tiles.first_block[index]
    size = -(-blocks // splits)
    items = np.zeros((len(index), COLUMNS), dtype=np.int32)
    items[:, ROW], items[:, TILE] = tiles.row[index], tiles.tile[index]
    items[:, FIRST] = (first_block + np.minimum(split * size, blocks)) * spec.block_n
    end = (first_block + np.minimum((split + 1) * size, blocks)) * spec.block_n
    items[:, END] = np.minimum(end, tiles.end[index])
    items[:, Q_START], items[:, Q_LEN] = tiles.q_start[index], tiles.q_len[index]
    items[:, KV_LEN] = tiles.kv_len[index]
    items[:, PARTIAL] = splits > 1
    return items
