"""The back ends of Triton kernels: flash2 (FlashAttention-2, split-KV) and flash1, its baseline.

Nothing on the host depends on a length: buffers are sized by the largest step, host-side counts
decide which kernels run, and all lengths are read on the device.  So a CUDA graph can capture a
step from plan to attend, and replay it with other lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.backend import BackendChoice, Capacity, Shape, UnsupportedAttention
from attention.common.flash1 import flash1
from attention.common.kernel_inputs import KernelInputs
from attention.common.tma_rows import empty_with_room
from attention.common.write_kv import write_kv
from attention.kv_pool import KVPool, LayerKV
from attention.metadata import AttentionMetadata
from attention.planned_kernel import (
    PlannedKernel,
    decode_kernel,
    decode_spec,
    mixed_kernel,
    most_decode_tokens,
    prefill_kernel,
    tile_spec,
)
from attention.planner.device_planner import DevicePlanner
from attention.planner.prefill_tiles import TilePlan
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.split_plan import SplitPlan, partials_for

# A kernel, and its arguments after KernelInputs: plans, or the rows' lengths.
KernelLaunch = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's plans by sliding window; empty where no row needs the kernel.

    kernel  the decode kernel that its rows need
    """

    kernel: PlannedKernel
    decode: dict[int, SplitPlan]
    prefill: dict[int, TilePlan]


class KernelBackend(ABC):
    """Base of the Triton back ends: Backend's write and attend by a list of kernel launches."""

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Backend.write; tokens with a negative slot are skipped."""
        write_kv(k, v, kv.k, kv.v, meta.slot_mappings[kv.group], kv.k_scale, kv.v_scale)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Backend.attend; the output of padding tokens, which belong to no row, is undefined."""
        out = empty_with_room(q.shape, q.dtype, q.device)
        inputs = KernelInputs(
            q, kv.k, kv.v, meta.page_tables[kv.group], out, lse, scale=scale,
            softcap=softcap, sinks=sinks, k_scale=kv.k_scale, v_scale=kv.v_scale,
        )  # fmt: skip
        for run, plans in self._kernels(meta, window):
            run(inputs, *plans)
        return out

    @abstractmethod
    def _kernels(self, meta: AttentionMetadata, window: int) -> list[KernelLaunch]:
        """The launches for a step's rows in layers with this window."""


class Flash1Backend(KernelBackend):
    name = "flash1"
    reads_lengths_on_device = True
    details = "flash1 for all rows"

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """No plan: each program finds its row by a binary search."""
        return meta

    def _kernels(self, meta: AttentionMetadata, window: int) -> list[KernelLaunch]:
        return [(partial(flash1, window=window), (meta.cu_seqlens_q, meta.cache_seqlens))]


class TritonBackend(KernelBackend):
    """flash2: FlashAttention-2 for prefill, planned split-KV attention for decode.

    Steps in which each row has one token run a decode kernel compiled for that.  In all others rows
    of 1 to max_decode_tokens tokens run another one, and longer rows are prefill.
    """

    name = "flash2"
    reads_lengths_on_device = True

    def __init__(
        self,
        choice: BackendChoice,
        shape: Shape,
        capacity: Capacity,
        device: torch.device,
        *,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """Allocates plans and partial results; arguments as in `build`."""
        self.max_decode_tokens = most_decode_tokens(choice.decode, shape, capacity.row_tokens)
        self._decode = {
            tokens: decode_kernel(choice.decode, shape, tokens)
            for tokens in {1, self.max_decode_tokens}
        }
        self._prefill = prefill_kernel(choice.prefill, shape)
        self.details = f"{choice.decode} split by {choice.planner}, {choice.prefill}"
        self._capacity = capacity
        try:
            self._planners = self._split_planners(choice.planner, shape, device, windows)
        except ValueError as error:  # an unknown planner, or a damaged file of costs
            raise UnsupportedAttention(f"--split-planner: {error}") from None
        self._tilers = {
            window: DeviceTiler(
                tile_spec(self._prefill, shape, device, window, self.max_decode_tokens),
                max_tokens=capacity.tokens,
                max_rows=capacity.rows,
                head_dim=shape.head_dim,
                device=device,
            )
            for window in windows
        }

    def _split_planners(
        self, planner: str, shape: Shape, device: torch.device, windows: tuple[int, ...]
    ) -> dict[tuple[int, int], dict[int, DevicePlanner]]:
        """By the kernel's tokens a row and its CTAs per SM, then by window.

        All share the memory of partial results, since one attends at a time.
        """
        specs = {
            (tokens, ctas_per_sm): {
                window: decode_spec(kernel, shape, device, window, tokens, ctas_per_sm)
                for window in windows
            }
            for tokens, kernel in self._decode.items()
            for ctas_per_sm in kernel.grids
        }
        rows, group = self._capacity.rows, shape.group
        queries = max(
            spec.partial_queries(rows, group)
            for by_window in specs.values()
            for spec in by_window.values()
        )
        partials = partials_for(queries, shape.head_dim, device)
        return {
            kind: {
                window: DevicePlanner(
                    spec,
                    planner,
                    max_rows=rows,
                    group=group,
                    head_dim=shape.head_dim,
                    device=device,
                    partials=partials,
                )
                for window, spec in by_window.items()
            }
            for kind, by_window in specs.items()
        }

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Launch the planners of the kernels that the step needs, one launch per window.

        Raises ValueError for a step larger than the capacity.
        """
        self._capacity.check(meta.num_rows, len(meta.slot_mappings[0]))
        lengths = meta.cu_seqlens_q, meta.cache_seqlens
        tokens = 1 if meta.max_seqlen_q <= 1 else self.max_decode_tokens
        kernel = self._decode[tokens]
        plan = TritonPlan(kernel, {}, {})
        prompts = meta.max_seqlen_q > tokens
        if meta.decode_rows or min(meta.q_lens, default=0) <= tokens:
            planners = self._planners[tokens, kernel.step_ctas_per_sm(meta.num_rows)]
            plan.decode.update((w, planner.plan(*lengths)) for w, planner in planners.items())
        if prompts:
            plan.prefill.update((w, tiler.plan(*lengths)) for w, tiler in self._tilers.items())
        return replace(meta, plan=plan)

    def _kernels(self, meta: AttentionMetadata, window: int) -> list[KernelLaunch]:
        plan = meta.plan
        assert isinstance(plan, TritonPlan), "plan() comes first"
        if window not in self._tilers:
            raise UnsupportedAttention(
                f"a window of {window} positions: this back end plans {sorted(self._tilers)}: "
                "name all windows of the model when it is made"
            )
        if window in plan.decode and window in plan.prefill:
            mixed = mixed_kernel(plan.kernel, self._prefill)
            if mixed:
                return [(mixed, (plan.decode[window], plan.prefill[window]))]
        launches: list[KernelLaunch] = []
        if window in plan.decode:
            launches.append((plan.kernel.run, (plan.decode[window],)))
        if window in plan.prefill:
            launches.append((self._prefill.run, (plan.prefill[window],)))
        return launches
