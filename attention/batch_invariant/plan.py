"""BatchInvariantPlan: tiles of queries, and pieces of KV whose borders no step can move.

A piece is PIECE positions of a row, counted from its first.  What a query gets of each piece, and
the order in which pieces are added up, depend on its own keys alone.  A plan only says who does it:
one program for all pieces of a tile or, where tiles are few, a program for each piece, whose
partial results are added up in the same order.  So a plan may follow the load, and no bit does.

Packed query row r of a row of the step is token r // group, head r % group of one KV head; a tile
is block_m of them.  `plan_batch_invariant` is the plan in numpy, for tests; device_fixed.py makes
it on the
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.planner.split_plan import Int32Array

# Columns of `items`.  FIRST and END are KV positions; FIRST is a multiple of the piece.  UNIT is
# where the partial result of the piece begins, or WHOLE for a tile with all its pieces.
ROW, TILE, FIRST, END, Q_START, Q_LEN, KV_LEN, UNIT = range(8)
COLUMNS = 8
WHOLE = -1
UNIT_ROWS = 16  # packed query rows of a unit of partial results
UNITS = 1024  # of partial results: enough for 512k positions of rows that decode


@dataclass(frozen=True, slots=True)
class BatchInvariantSpec:
    """What a plan depends on besides the rows' lengths; `piece` alone moves bits."""

    kv_heads: int
    group: int  # query heads a KV head
    programs: int  # that run at once
    block_m: int  # packed query rows of a tile: a power of two, UNIT_ROWS at least
    split: int  # KV positions
    window: int = 0  # a query sees so many positions up to its own; 0: all
    units: int = UNITS

    def capacity(self, max_tokens: int, max_rows: int) -> int:
        """Items of any step: one a tile, or one a piece, each with a unit at least."""
        return max_tokens * self.group // self.block_m + max_rows + self.units


@dataclass(frozen=True, slots=True)
class BatchInvariantPlan:
    """In device memory, in buffers whose sizes depend on no length: a graph can replay it.

    items   [capacity, 8] int32   entries past counts[0] are junk
    merges  [units, 2] int32      (first item, pieces) of each tile that is cut; counts[1] of them
    counts  [2] int32
    partial_out  [kv_heads, units * UNIT_ROWS, head_dim] float32   a piece's softmax applied
    partial_lse  [kv_heads, units * UNIT_ROWS] float32             base 2; -inf: nothing seen
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

    A row is cut if its pieces are more than a program's share of all: it would be the last to end.
    Rows are cut as long as there is room for their partial results.
    """
    q_len = np.diff(cu_seqlens_q).astype(np.int64)
    kv_len = cache_seqlens.astype(np.int64)
    before = kv_len - q_len
    tiles = -(-q_len * spec.group // spec.block_m)
    first = np.maximum(before + 1 - spec.window, 0) // spec.split if spec.window else 0 * kv_len
    splits = np.maximum(-(-kv_len // spec.split) - first, 1)
    share = (tiles * splits).sum() * spec.kv_heads // spec.programs
    height = np.minimum(spec.block_m, q_len * spec.group)
    units = -(-height // UNIT_ROWS)  # of a piece
    wants = (tiles > 0) & (splits > np.maximum(share, 1))
    ends = np.cumsum(np.where(wants, tiles * splits * units, 0))
    starts = ends - tiles * splits * units
    cut = wants & (ends <= spec.units)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, int]] = []
    for row in np.flatnonzero(tiles).tolist():
        each = int(splits[row]) if cut[row] else 1
        for place in range(int(tiles[row])):
            tile = int(tiles[row]) - 1 - place  # the longest first
            low, high = _extent(tile, int(q_len[row]), int(kv_len[row]), spec)
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


def _extent(tile: int, q_len: int, kv_len: int, spec: BatchInvariantSpec) -> tuple[int, int]:
    """Where the keys begin, at a piece's border, and end that any query of the tile sees."""
    last = min(((tile + 1) * spec.block_m - 1) // spec.group, q_len - 1)
    end = max(kv_len - q_len + last + 1, 0)
    if not spec.window:
        return 0, end
    first_query = kv_len - q_len + tile * spec.block_m // spec.group
    return max(first_query + 1 - spec.window, 0) // spec.split * spec.split, end
