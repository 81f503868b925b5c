"""FixedBackend: attention in which a token's result has the same bits in every step."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backend import Capacity, Shape, UnsupportedAttention
from attention.batch_invariant.kernel import fixed, fixed_config
from attention.batch_invariant.plan import FixedPlan, FixedSpec
from attention.batch_invariant.plan_device import FixedPlanner
from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta
from attention.planned_kernel import multiprocessors
from attention.triton_backend import KernelBackend, Launch


class FixedBackend(KernelBackend):
    """One kernel for all rows; a plan moves work between programs and no bit of a result."""

    name = "fixed"
    reads_lengths_on_device = True

    def __init__(
        self,
        shape: Shape,
        capacity: Capacity,
        device: torch.device,
        *,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """Takes the memory for plans and partial results; arguments as in `build`."""
        config = fixed_config(shape.head_dim, shape.dtype)
        self.details = f"pieces of {config.piece} for all rows"
        self._capacity = capacity
        self._planners = {
            window: FixedPlanner(
                FixedSpec(
                    kv_heads=shape.kv_heads,
                    group=shape.group,
                    programs=multiprocessors(device) * config.resident,
                    block_m=config.block_m,
                    piece=config.piece,
                    window=window,
                ),
                max_tokens=capacity.tokens,
                max_rows=capacity.rows,
                head_dim=shape.head_dim,
                device=device,
            )
            for window in windows
        }

    def plan(self, meta: ForwardMeta, kv: KVPool) -> ForwardMeta:
        """Queue the planners, one launch for each window.

        Raises ValueError if the step is larger than the back end was made for.
        """
        self._capacity.check(meta.num_rows, len(meta.write_slots))
        lengths = meta.cu_seqlens_q, meta.cache_seqlens
        plans = {window: planner.plan(*lengths) for window, planner in self._planners.items()}
        return replace(meta, plan=plans)

    def _kernels(self, meta: ForwardMeta, window: int) -> list[Launch]:
        assert isinstance(meta.plan, dict), "plan() comes first"
        plan = meta.plan.get(window)
        if not isinstance(plan, FixedPlan):
            raise UnsupportedAttention(
                f"a window of {window} positions: this back end plans {sorted(self._planners)}: "
                "name all windows of the model when it is made"
            )
        return [(fixed, (plan,))]
