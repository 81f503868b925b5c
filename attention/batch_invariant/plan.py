"""BatchInvariantPlan: query tiles, and KV splits at positions that are the same in every step.

A split is spec.split positions of a row, counted from position 0.  A query's partial result of each
split, and the order in which they are added, depend on its own keys.  A plan only assigns work: one
program for all splits of a tile or, where tiles are few, a program per split, whose partial
results are added in the same order.  So a plan may follow the load, and results stay bitwise equal.

Packed query row r of a row of the step is token r // group, head r % group of one KV head; a tile
is block_m of them.  `plan_batch_invariant` is the plan in numpy, for tests; plan_device.py makes it
on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.planner.split_plan import Int32Array

# Columns of `items`.  FIRST and END are KV positions; FIRST is a multiple of the split.  UNIT is
# the first unit of the split's partial result, or WHOLE for a tile with all its splits.
ROW, TILE, FIRST, END, Q_START, Q_LEN, KV_LEN, UNIT = range(8)
COLUMNS = 8
WHOLE = -1
UNIT_ROWS = 16  # packed query rows of a unit of partial results
UNITS = 1024  # of partial results: enough for 512k positions of decode rows


@dataclass(frozen=True, slots=True)
class BatchInvariantSpec:
    """The parameters of a plan besides the rows' lengths; results depend bitwise on `split`."""

    kv_heads: int
    group: int  # query heads per KV head
    programs: int  # grid: SMs * CTAs per SM
    block_m: int  # packed query rows of a tile: a power of two, UNIT_ROWS at least
    split: int  # KV positions
    window: int = 0  # sliding window in positions; 0: full attention
    units: int = UNITS

    def capacity(self, max_tokens: int, max_rows: int) -> int:
        """Items that any step needs: one per tile, or one per split, each with at least a unit."""
        return max_tokens * self.group // self.block_m + max_rows + self.units


@dataclass(frozen=True, slots=True)
class BatchInvariantPlan:
    """A plan in device memory, in buffers sized by capacity: a CUDA graph can replay it.

    items   [capacity, 8] int32   entries past counts[0] are junk
    merges  [units, 2] int32      (first item, splits) of each split tile; counts[1] of them
    counts  [2] int32             items and merges
    partial_out  [kv_heads, units * UNIT_ROWS, head_dim] float32   normalized per split
    partial_lse  [kv_heads, units * UNIT_ROWS] float32             base 2; -inf: no key seen
    """

    spec: BatchInvariantSpec
    items: Tensor
    merges: Tensor
    counts: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @classmethod
    def allocate(
        cls,
        spec: BatchInvariantSpec,
        *,
        max_tokens: int,
        max_rows: int,
        head_dim: int,
        device: torch.device,
    ) -> BatchInvariantPlan:
        """Buffers for steps of at most max_tokens query tokens in max_rows rows."""
        partial = (spec.kv_heads, spec.units * UNIT_ROWS)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            spec=spec,
            items=ints(spec.capacity(max_tokens, max_rows), COLUMNS),
            merges=ints(spec.units, 2),
            counts=ints(2),
            partial_out=torch.empty(*partial, head_dim, device=device),
            partial_lse=torch.empty(partial, device=device),
        )


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
