"""BatchInvariantBackend: attention whose results are bitwise independent of the batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backend import Capacity, Shape, UnsupportedAttention
from attention.batch_invariant.kernel import batch_invariant_attention, batch_invariant_config
from attention.batch_invariant.plan import BatchInvariantPlan, BatchInvariantSpec
from attention.batch_invariant.plan_device import BatchInvariantPlanner
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.planned_kernel import multiprocessors
from attention.triton_backend import KernelBackend, KernelLaunch


class BatchInvariantBackend(KernelBackend):
    """One kernel for all rows; its plan assigns work to programs without changing any result."""

    name = "batch-invariant"
    reads_lengths_on_device = True

    def __init__(
        self,
        shape: Shape,
        capacity: Capacity,
        device: torch.device,
        *,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """Allocates plans and partial results; arguments as in `build`."""
        config = batch_invariant_config(shape.head_dim, shape.dtype)
        self.details = f"KV splits of {config.split} for all rows"
        self._capacity = capacity
        self._planners = {
            window: BatchInvariantPlanner(
                BatchInvariantSpec(
                    kv_heads=shape.kv_heads,
                    group=shape.group,
                    programs=multiprocessors(device) * config.ctas_per_sm,
                    block_m=config.block_m,
                    split=config.split,
                    window=window,
                ),
                max_tokens=capacity.tokens,
                max_rows=capacity.rows,
                head_dim=shape.head_dim,
                device=device,
            )
            for window in windows
        }

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Launch the planners, one launch per window.

        Raises ValueError for a step larger than the capacity.
        """
        self._capacity.check(meta.num_rows, len(meta.slot_mappings[0]))
        lengths = meta.cu_seqlens_q, meta.cache_seqlens
        plans = {window: planner.plan(*lengths) for window, planner in self._planners.items()}
        return replace(meta, plan=plans)

    def _kernels(self, meta: AttentionMetadata, window: int) -> list[KernelLaunch]:
        assert isinstance(meta.plan, dict), "plan() comes first"
        plan = meta.plan.get(window)
        if not isinstance(plan, BatchInvariantPlan):
            raise UnsupportedAttention(
                f"a window of {window} positions: this back end plans {sorted(self._planners)}: "
                "name all windows of the model when it is made"
            )
        return [(batch_invariant_attention, (plan,))]
