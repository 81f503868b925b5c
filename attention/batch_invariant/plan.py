"""BatchInvariantPlan: query tiles, and KV splits at positions that are the same in every step.

A split is spec.split positions of a row, counted from position 0.  A query's partial result of each
split, and the order in which they are added, depend on its own keys.  A plan only assigns work: one
program for all splits of a tile or, where tiles are few, a program per split, whose partial
results are added in the same order.  So a plan may follow the load, and results stay bitwise equal.

Packed query row r of a row of the step is token r // group, head r % group of one KV head; a tile
is block_m of them.  plan_device.py makes the plan on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
