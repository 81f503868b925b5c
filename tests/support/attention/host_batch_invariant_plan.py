"""Batch-invariant plans in numpy: what the planner kernel is compared with."""

from __future__ import annotations

import numpy as np

from attention.batch_invariant.plan import COLUMNS, UNIT_ROWS, WHOLE, BatchInvariantSpec
from attention.planner.split_plan import Int32Array


def plan_batch_invariant(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: BatchInvariantSpec
) -> tuple[Int32Array, Int32Array]:
    """cu_seqlens_q [B + 1], cache_seqlens [B] -> (items, merges).

    A row's tiles are split if it has more splits than a program's share of all, since one program
    would end last; rows are split while there is room for their partial results.
    """
    q_len = np.diff(cu_seqlens_q).astype(np.int64)
    kv_len = cache_seqlens.astype(np.int64)
    before = kv_len - q_len
    tiles = -(-q_len * spec.group // spec.block_m)
    first = np.maximum(before + 1 - spec.window, 0) // spec.split if spec.window else 0 * kv_len
    splits = np.maximum(-(-kv_len // spec.split) - first, 1)
    share = (tiles * splits).sum() * spec.kv_heads // spec.programs
    height = np.minimum(spec.block_m, q_len * spec.group)
    units = -(-height // UNIT_ROWS)  # of a split
    oversized = (tiles > 0) & (splits > np.maximum(share, 1))
    ends = np.cumsum(np.where(oversized, tiles * splits * units, 0))
    starts = ends - tiles * splits * units
    cut = oversized & (ends <= spec.units)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, int]] = []
    for row in np.flatnonzero(tiles).tolist():
        each = int(splits[row]) if cut[row] else 1
        for place in range(int(tiles[row])):
            tile = int(tiles[row]) - 1 - place  # longest first
            low, high = _kv_range(tile, int(q_len[row]), int(kv_len[row]), spec)
            if cut[row]:
                merges.append((len(items), each))
            for split in range(each):
                begin, end, unit = low, high, WHOLE
                if cut[row]:
                    begin = int(first[row] + split) * spec.split
                    end = min(begin + spec.split, high)
                    unit = int(starts[row] + (place * each + split) * units[row])
                lengths = int(cu_seqlens_q[row]), int(q_len[row]), int(kv_len[row])
                items.append((row, tile, begin, end, *lengths, unit))
    columns = np.array(items, dtype=np.int32).reshape(-1, COLUMNS)
    return columns, np.array(merges, dtype=np.int32).reshape(-1, 2)


def _kv_range(tile: int, q_len: int, kv_len: int, spec: BatchInvariantSpec) -> tuple[int, int]:
    """The KV range that any query of the tile sees; it begins at a split's border."""
    last = min(((tile + 1) * spec.block_m - 1) // spec.group, q_len - 1)
    end = max(kv_len - q_len + last + 1, 0)
    if not spec.window:
        return 0, end
    first_query = kv_len - q_len + tile * spec.block_m // spec.group
    return max(first_query + 1 - spec.window, 0) // spec.split * spec.split, end
