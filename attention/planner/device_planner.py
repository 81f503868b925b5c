"""DevicePlanner: split plans made on the GPU, where the lengths are.

One launch of a fixed grid without host synchronization, so that a CUDA graph can capture it; the
integers equal those of the numpy planners.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attention.planner.queued_plans import MAX_SPLIT_ROWS, split_cap
from attention.planner.rows_device import check_lengths
from attention.planner.split_counts_device import plan_counts
from attention.planner.split_plan import EIGHTHS, SplitPlan, SplitPlanSpec
from attention.planner.stream_k import interleaved_heads
from attention.planner.stream_k_device import plan_stream_k

PLANNERS = ("stream-k", "greedy", "fa3")
# Measured on an H100.
NUM_WARPS = 8
UNITS_EACH = 64  # of plan_stream_k: (row, KV head) pairs per program
COUNTS_ROWS, COUNTS_LANES, COUNTS_CHUNK = 8, 32, 256  # of plan_counts


class DevicePlanner:
    """Plans steps of at most max_rows rows into one preallocated SplitPlan."""

    def __init__(
        self,
        spec: SplitPlanSpec,
        planner: str,
        *,
        max_rows: int,
        group: int,
        head_dim: int,
        device: torch.device,
        partials: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """group, partials: query heads per KV head and memory, as for SplitPlan.allocate.

        Plans of greedy and fa3 are queued.  Raises ValueError for an unknown planner.
        """
        if planner not in PLANNERS:
            known = f"{', '.join(PLANNERS[:-1])} or {PLANNERS[-1]}"
            raise ValueError(f"no split planner is named `{planner}`: use {known}")
        assert max_rows >= 1 and spec.work_tile_cost >= 0 and spec.min_blocks >= 1
        self.max_rows = max_rows
        self._planner = planner
        self._plan = SplitPlan.allocate(
            spec,
            max_rows=max_rows,
            group=group,
            head_dim=head_dim,
            queued=planner != "stream-k",
            device=device,
            partials=partials,
        )

    def plan(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor) -> SplitPlan:
        """Plan the rows of cu_seqlens_q [B + 1] and cache_seqlens [B], int32 on the device.

        Padding rows have q_len 0.  Each call overwrites and returns the same tensors.  Raises
        ValueError if B exceeds max_rows.
        """
        num_rows = check_lengths(cu_seqlens_q, cache_seqlens, self.max_rows, "split")
        if self._planner == "stream-k":
            self._launch_stream_k(cu_seqlens_q, cache_seqlens, num_rows)
        else:
            self._launch_counts(cu_seqlens_q, cache_seqlens, num_rows)
        return self._plan

    def _launch_stream_k(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor, num_rows: int) -> None:
        plan, spec = self._plan, self._plan.spec
        max_rows = triton.next_power_of_2(self.max_rows)
        interleaved = interleaved_heads(spec)
        heads, programs = spec.kv_heads // interleaved, spec.programs // interleaved
        row_units = triton.next_power_of_2(heads)
        rows_each = max(UNITS_EACH // row_units, 1)
        boundaries = triton.next_power_of_2(programs + 1)
        plan_stream_k[(1 + triton.cdiv(num_rows, rows_each), interleaved)](
            cu_seqlens_q, cache_seqlens, plan.work, plan.starts, plan.merges, plan.queue, num_rows,
            INTERLEAVED=interleaved, HEADS=heads, PROGRAMS=programs, MAX_Q_LEN=spec.max_q_len,
            WINDOW=spec.window, BLOCK=spec.block, WORK_TILE_COST=spec.work_tile_cost,
            MIN_SHARE=EIGHTHS * spec.min_blocks, MAX_ROWS=max_rows,
            BOUNDARIES=boundaries, ROWS_EACH=rows_each, ROW_UNITS=row_units,
            num_warps=NUM_WARPS if boundaries > 64 else NUM_WARPS // 2,
        )  # fmt: skip

    def _launch_counts(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor, num_rows: int) -> None:
        plan, spec = self._plan, self._plan.spec
        max_rows = triton.next_power_of_2(self.max_rows)
        rows_each = min(COUNTS_ROWS, max_rows)
        plan_counts[(max(triton.cdiv(num_rows, rows_each), 1),)](
            cu_seqlens_q, cache_seqlens, plan.work, plan.starts, plan.merges, plan.queue, num_rows,
            HEADS=spec.kv_heads, PROGRAMS=spec.programs, MAX_Q_LEN=spec.max_q_len,
            WINDOW=spec.window, BLOCK=spec.block, WORK_TILE_COST=spec.work_tile_cost,
            MERGE_COST=spec.merge_cost, MERGE_TILE_COST=spec.merge_tile_cost,
            CAP=split_cap(spec.kv_heads, spec.programs), MAX_SPLIT_ROWS=MAX_SPLIT_ROWS,
            GREEDY=self._planner == "greedy", MAX_ROWS=max_rows,
            BOUNDARIES=triton.next_power_of_2(spec.programs + 1),
            CHUNK=min(max_rows, COUNTS_CHUNK), ROWS_EACH=rows_each, LANES=COUNTS_LANES,
            num_warps=NUM_WARPS,
        )  # fmt: skip
