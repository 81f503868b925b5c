"""SplitPlan: the work tiles of split-KV decode, made once per step and used by every layer.

The decode kernel has a fixed grid of `programs`; a plan gives each of them work tiles.  A work tile
is a contiguous range of one row's KV for one KV head.  The tiles of a split row write partial
results, which the combine kernel merges.  Only rows with q_len up to `max_q_len` are planned here:
the others are prefill (prefill_tiles.py).

Everything a kernel needs of a row is copied into its work tiles, so that a program reads one entry
of 32 bytes instead of following row -> cu_seqlens -> cache_seqlens, each a memory round trip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]
EIGHTHS = 8  # of a block: the integer unit of costs, so that host and device agree exactly

# Columns of `work`.  FIRST and END are KV positions; FIRST is a multiple of the block, END too, or
# the row's KV length.  PARTIAL is 1 if other work tiles share the tile's row and KV head.
ROW, HEAD, FIRST, END, Q_START, Q_LEN, KV_LEN, PARTIAL = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class SplitPlanSpec:
    """The parameters of a plan besides the rows' lengths; costs in eighths of a block's time."""

    kv_heads: int
    programs: int  # grid of the decode kernel: SMs * CTAs per SM
    max_q_len: int = 1  # rows with more query tokens are left to the prefill kernel
    window: int = 0  # sliding window in positions; 0: full attention
    block: int = 64  # tokens; splits are at multiples of it
    work_tile_cost: int = 8  # fixed cost of a work tile: prologue, pipeline fill, partial write
    merge_cost: int = 8  # fixed cost of a combine
    merge_tile_cost: int = 1  # a combine costs this * partial results / programs in addition
    min_blocks: int = 1  # of a program's share

    def capacity(self, max_rows: int) -> int:
        """Entries of `work` that a step of at most max_rows rows needs."""
        return max_rows * self.kv_heads + 2 * self.programs + 1

    def partial_queries(self, max_rows: int, group: int) -> int:
        """Packed queries of the partial results of such a step, `group` query heads a KV head."""
        return self.capacity(max_rows) * self.max_q_len * group


@dataclass(frozen=True, slots=True)
class HostSplitPlan:
    """A plan in host memory, for tests and simulation; `SplitPlan` holds the same integers.

    work    [n, 8] int32        work tiles; those of a row and KV head are consecutive, in KV order
    starts  [programs + 1] int32  program p runs work[starts[p] : starts[p + 1]]; in a queued plan
                                all entries are n: a free program takes the next work tile
    merges  [programs, 2] int32  (first work tile, number of tiles) of each split row and KV head,
                                then zeros: at most rows * kv_heads entries are used, and the
                                combine kernel's grid is no larger
    """

    work: Int32Array
    starts: Int32Array
    merges: Int32Array
    queued: bool  # work tiles are taken from a queue, longest first, not assigned to programs


def partials_for(queries: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of partial results: outputs [queries, head_dim] and their lse [queries], float32."""
    return torch.empty(queries, head_dim, device=device), torch.empty(queries, device=device)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan in device memory, in buffers sized by capacity: a CUDA graph can replay it.

    work    [capacity, 8] int32     as HostSplitPlan; entries past the work tiles are junk
    starts  [programs + 1] int32    as HostSplitPlan
    merges  [programs, 2] int32     as HostSplitPlan
    queue   [1] int32               next work tile to take; 0 between launches
    partial_out  [capacity, max_q_len * group, head_dim] float32   normalized per work tile
    partial_lse  [capacity, max_q_len * group] float32             base 2; -inf: no key seen
    """

    spec: SplitPlanSpec
    work: Tensor
    starts: Tensor
    merges: Tensor
    queue: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    queued: bool

    @classmethod
    def allocate(
        cls,
        spec: SplitPlanSpec,
        *,
        max_rows: int,
        group: int,
        head_dim: int,
        queued: bool,
        device: torch.device,
        partials: tuple[Tensor, Tensor] | None = None,
    ) -> SplitPlan:
        """Buffers for steps of at most max_rows rows and `group` query heads per KV head.

        partials  memory of `partials_for`, shared by plans that never run at the same time; None:
                  of its own
        """
        capacity, queries = spec.capacity(max_rows), spec.max_q_len * group
        count = spec.partial_queries(max_rows, group)
        out, lse = partials or partials_for(count, head_dim, device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            spec=spec,
            work=ints(capacity, COLUMNS),
            starts=ints(spec.programs + 1),
            merges=ints(spec.programs, 2),
            queue=ints(1),
            partial_out=out[:count].view(capacity, queries, head_dim),
            partial_lse=lse[:count].view(capacity, queries),
            queued=queued,
        )

    def load(self, plan: HostSplitPlan) -> None:
        """Copy a plan made on the host; for tests and benchmarks."""
        assert plan.queued == self.queued and len(plan.work) <= len(self.work)
        self.work[: len(plan.work)] = torch.from_numpy(plan.work)
        self.starts.copy_(torch.from_numpy(plan.starts))
        self.merges.copy_(torch.from_numpy(plan.merges))
        self.queue.zero_()


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of a step that the decode kernel serves, with their queries and KV blocks."""

    row: Int32Array  # [R] rows of the step with 1 <= q_len <= max_q_len, in order
    q_start: Int32Array
    q_len: Int32Array
    kv_len: Int32Array
    first_block: Int32Array  # blocks before it are outside every query's window
    blocks: Int32Array  # from first_block to the end; 0: an empty row, which still gets a work tile


def planned_rows(
    cu_seqlens_q: Int32Array, cache_seqlens: Int32Array, spec: SplitPlanSpec
) -> PlannedRows:
    """cu_seqlens_q [B + 1], cache_seqlens [B] -> the rows that the decode kernel serves."""
    q_lens = np.diff(cu_seqlens_q)
    row = np.flatnonzero((q_lens >= 1) & (q_lens <= spec.max_q_len)).astype(np.int32)
    q_len, kv_len = q_lens[row].astype(np.int32), cache_seqlens[row].astype(np.int32)
    first = np.zeros_like(kv_len)
    if spec.window:
        first = np.maximum(kv_len - q_len + 1 - spec.window, 0) // spec.block
    blocks = -(-kv_len // spec.block) - first
    return PlannedRows(row, cu_seqlens_q[row].astype(np.int32), q_len, kv_len, first, blocks)


def work_tiles_of(
    rows: PlannedRows,
    index: Int32Array,
    head: Int32Array,
    first: Int32Array,
    end: Int32Array,
    spec: SplitPlanSpec,
) -> Int32Array:
    """The `work` entries of blocks first..end of rows[index]; PARTIAL where they are not all."""
    work = np.zeros((len(index), COLUMNS), dtype=np.int32)
    offset = rows.first_block[index]
    work[:, ROW], work[:, HEAD] = rows.row[index], head
    work[:, FIRST] = (offset + first) * spec.block
    work[:, END] = np.minimum((offset + end) * spec.block, rows.kv_len[index])
    work[:, Q_START], work[:, Q_LEN] = rows.q_start[index], rows.q_len[index]
    work[:, KV_LEN] = rows.kv_len[index]
    work[:, PARTIAL] = end - first < rows.blocks[index]
    return work
