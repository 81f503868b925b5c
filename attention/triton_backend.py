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
from attention.common.write_kv import write_kv
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.planned_kernel import (
    decode_kernel,
    decode_spec,
    mixed_kernel,
    prefill_kernel,
    tile_spec,
)
from attention.planner.device_planner import DevicePlanner
from attention.planner.prefill_tiles import TilePlan
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.split_plan import SplitPlan

MAX_DECODE_TOKENS = 1  # largest q_len of a decode row; rows with more are prefill
# A kernel, and its arguments after KernelInputs: plans, or the rows' lengths.
KernelLaunch = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's plans by sliding window; empty where no row needs the kernel."""

    decode: dict[int, SplitPlan]
    prefill: dict[int, TilePlan]


class KernelBackend(ABC):
    """Base of the Triton back ends: Backend's write and attend by a list of kernel launches."""

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: AttentionMetadata) -> None:
        """Backend.write; tokens with a negative slot are skipped."""
        write_kv(k, v, kv.k[layer], kv.v[layer], meta.slot_mapping, *kv.scales(layer))

    def attend(
        self,
        q: Tensor,
        kv: KVPool,
        layer: int,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Backend.attend; the output of padding tokens, which belong to no row, is undefined."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = kv.scales(layer)
        inputs = KernelInputs(
            q, kv.k[layer], kv.v[layer], meta.page_table, out, lse, scale=scale,
            softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
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
    """flash2: FlashAttention-2 for prefill, planned split-KV attention for decode."""

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
        self._decode = decode_kernel(choice.decode, shape, MAX_DECODE_TOKENS)
        self._prefill = prefill_kernel(choice.prefill, shape)
        self._mixed = mixed_kernel(self._decode, self._prefill)
        self.details = f"{choice.decode} split by {choice.planner}, {choice.prefill}"
        self._capacity = capacity

        def planners(ctas_per_sm: int) -> dict[int, DevicePlanner]:
            return {
                window: DevicePlanner(
                    decode_spec(
                        self._decode, shape, device, window, MAX_DECODE_TOKENS, ctas_per_sm
                    ),
                    choice.planner,
                    max_rows=capacity.rows,
                    group=shape.group,
                    head_dim=shape.head_dim,
                    device=device,
                )
                for window in windows
            }

        try:
            ctas_choices = {
                self._decode.ctas_per_sm,
                self._decode.decode_ctas_per_sm or self._decode.ctas_per_sm,
            }
            self._planners = {ctas_per_sm: planners(ctas_per_sm) for ctas_per_sm in ctas_choices}
        except ValueError as error:  # an unknown planner, or a damaged file of costs
            raise UnsupportedAttention(f"--split-planner: {error}") from None
        self._tilers = {
            window: DeviceTiler(
                tile_spec(self._prefill, shape, device, window, MAX_DECODE_TOKENS),
                max_tokens=capacity.tokens,
                max_rows=capacity.rows,
                head_dim=shape.head_dim,
                device=device,
            )
            for window in windows
        }

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Launch the planners of the kernels that the step needs, one launch per window.

        Raises ValueError for a step larger than the capacity.
        """
        self._capacity.check(meta.num_rows, len(meta.slot_mapping))
        lengths = meta.cu_seqlens_q, meta.cache_seqlens
        plan = TritonPlan({}, {})
        prompts = meta.max_seqlen_q > MAX_DECODE_TOKENS
        if meta.decode_rows or min(meta.q_lens, default=0) <= MAX_DECODE_TOKENS:
            planners = self._planners[self._decode.step_ctas_per_sm(meta.num_rows, prompts=prompts)]
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
        if self._mixed and window in plan.decode and window in plan.prefill:
            return [(self._mixed, (plan.decode[window], plan.prefill[window]))]
        launches: list[KernelLaunch] = []
        if window in plan.decode:
            launches.append((self._decode.run, (plan.decode[window],)))
        if window in plan.prefill:
            launches.append((self._prefill.run, (plan.prefill[window],)))
        return launches
