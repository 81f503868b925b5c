"""SplitPlan: who attends to which part of the KV, made once a step and used by every layer.

The decode kernel has a fixed grid of `programs`; a plan gives each of them pieces of work.  A piece
is a run of one row's KV for one KV head.  Rows that are cut leave one partial result a piece, which
the combine kernel merges.  Only rows that feed at most `max_q_len` tokens are planned here: the
others are prefill (tiles.py).

Everything a kernel needs of a row is copied into its pieces, so that a program reads one line of
32 bytes instead of following row -> cu_seqlens -> cache_seqlens, each a trip to memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]
EIGHTHS = 8  # of a block: costs are integers in them, so that host and device agree to the bit

# Columns of `work`.  FIRST and END are KV positions; FIRST is a multiple of the block, END is one
# or the row's KV length.  PARTIAL is 1 if other pieces share the piece's row and KV head.
ROW, HEAD, FIRST, END, Q_START, Q_LEN, KV_LEN, PARTIAL = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class SplitPlanSpec:
    """What a plan depends on besides the rows' lengths.  Costs are in eighths of a block's time."""

    kv_heads: int
    programs: int  # size of the decode kernel's grid: SMs * resident programs an SM
    max_q_len: int = 1  # rows that feed more tokens are left out: the prefill kernel serves them
    window: int = 0  # a query sees so many positions up to its own; 0: all
    block: int = 64  # tokens; cuts are at multiples of it
    work_tile_cost: int = 8  # fixed cost of a piece: prologue, pipeline fill, partial write
    merge_cost: int = 8  # of having anything to combine
    merge_tile_cost: int = 1  # of a partial result, times partial results, over programs
    min_blocks: int = 1  # a program's share is at least so many blocks

    def capacity(self, max_rows: int) -> int:
        """Entries that `work` needs for so many rows."""
        return max_rows * self.kv_heads + 2 * self.programs + 1


@dataclass(frozen=True, slots=True)
class HostSplitPlan:
    """A plan in host memory, for tests and simulation; `SplitPlan` holds the same integers.

    work    [n, 8] int32        the pieces; those of one row and KV head are neighbours, in KV order
    starts  [programs + 1] int32  program p serves work[starts[p] : starts[p + 1]]; with a queue all
                                entries are n: programs take the next piece as they become free
    merges  [programs, 2] int32  (first piece, pieces) of each row and KV head that is cut, one
                                after the other; then zeros.  So no more than rows * kv_heads
                                entries are used, and the combine kernel's grid needs no more
    """

    work: Int32Array
    starts: Int32Array
    merges: Int32Array
    queued: bool  # pieces are taken from a queue, longest first, not assigned


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan in device memory, in buffers whose sizes depend on no length: a graph can replay it.

    work    [capacity, 8] int32     as HostSplitPlan; entries past the pieces are junk
    starts  [programs + 1] int32    as HostSplitPlan
    merges  [programs, 2] int32     as HostSplitPlan
    queue   [1] int32               next piece to take; 0 between uses
    partial_out  [capacity, max_q_len * group, head_dim] float32   a piece's own softmax applied
    partial_lse  [capacity, max_q_len * group] float32             base 2; -inf: nothing seen
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
    ) -> SplitPlan:
        """Buffers for steps of at most max_rows rows and `group` query heads a KV head."""
        capacity, queries = spec.capacity(max_rows), spec.max_q_len * group

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            spec=spec,
            work=ints(capacity, COLUMNS),
            starts=ints(spec.programs + 1),
            merges=ints(spec.programs, 2),
            queue=ints(1),
            partial_out=torch.empty(capacity, queries, head_dim, device=device),
            partial_lse=torch.empty(capacity, queries, device=device),
            queued=queued,
        )

    def load(self, plan: HostSplitPlan) -> None:
        """Take over a plan made on the host; for tests and benchmarks."""
        assert plan.queued == self.queued and len(plan.work) <= len(self.work)
        self.work[: len(plan.work)] = torch.from_numpy(plan.work)
        self.starts.copy_(torch.from_numpy(plan.starts))
        self.merges.copy_(torch.from_numpy(plan.merges))
        self.queue.zero_()


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The planned rows of a step: index, where their queries are, and their blocks of KV."""

    row: Int32Array  # [R] rows of the step with 1 <= q_len <= max_q_len, in order
    q_start: Int32Array
    q_len: Int32Array
    kv_len: Int32Array
    first_block: Int32Array  # blocks before it are outside every query's window
    blocks: (
        Int32Array  # blocks from there to the end; 0 for an empty row, which is served all the same
    )


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
