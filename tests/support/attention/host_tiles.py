"""Tile plans in numpy: what the planner kernel of prefill tiles is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attention.planner.prefill_tiles import (
    COLUMNS,
    END,
    FIRST,
    KV_LEN,
    PARTIAL,
    Q_LEN,
    Q_START,
    ROW,
    TILE,
    TilePlan,
    TileSpec,
)
from attention.planner.split_plan import Int32Array


@dataclass(frozen=True, slots=True)
class HostTiles:
    """A tile plan in host memory; `TilePlan` holds the same integers.

    items   [n, 8] int32  longest first; by row, tile and KV position where all of them run at once,
                          the only case in which tiles are split
    merges  [m, 2] int32  (first item, number of items) of each split tile
    tokens  total KV positions that the rows see, per KV head
    """

    items: Int32Array
    merges: Int32Array
    tokens: int


def load(tiles: TilePlan, plan: HostTiles) -> None:
    """Copy a plan made on the host."""
    num_items, num_merges = len(plan.items), len(plan.merges)
    assert num_items <= len(tiles.items) and num_merges <= len(tiles.merges)
    tiles.items[:num_items] = torch.from_numpy(plan.items)
    tiles.merges[:num_merges] = torch.from_numpy(plan.merges)
    tiles.counts.copy_(torch.tensor([num_items, num_merges, plan.tokens], dtype=torch.int32))
    tiles.queue.zero_()


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query tiles of a step, ordered by row and tile."""

    row: Int32Array  # [T]
    tile: Int32Array
    q_start: Int32Array
    q_len: Int32Array
    kv_len: Int32Array
    first_block: Int32Array  # blocks before it are outside every query's window
    end: Int32Array  # one past the last KV position that any query sees; 0: an empty row
    blocks: Int32Array  # from first_block to end


def tiles_of(cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: TileSpec) -> Tiles:
    """cu_seqlens_q [B + 1], cache_seqlens [B] -> the tiles of the prefill rows."""
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
    """The step's tiles, longest first; split along KV if they are fewer than run at once.

    Length is the blocks up to the tile's end, at most those of a window: within one of what it
    reads, and never decreasing along a row's tiles, which prefill_tiles_device.py relies on.
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
    """The total KV positions that the rows see."""
    first_tiles = tiles.tile == 0
    q_len, kv_len = tiles.q_len[first_tiles], tiles.kv_len[first_tiles]
    seen = np.minimum(kv_len, q_len - 1 + spec.window) if spec.window else kv_len
    return int(seen.sum())


def _splits(blocks: Int32Array, spec: TileSpec) -> NDArray[np.int64]:
    """Splits of each tile [T], at least one, in total at most spec.split_items.

    The split length is that of the longest tile in k splits.  Bisection finds the largest k, since
    the total never decreases with k.
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
    """The items of split `split` out of `splits` equal ones of tiles[index]."""
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
