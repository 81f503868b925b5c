"""WavePicture: what each program of a decode step reads, beside FlashAttention-3's rule.

The plan is made on the host from the rows' lengths, by the planners of attention/planner/; the GPU
makes the same integers.  Times are simulated with every program as fast as the others
(simulation.py, `rho` 1), so they show how well a plan fills its waves, not what memory adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.backend import BackendChoice, Shape
from attention.dispatch import Machine, dispatch
from attention.planned_kernel import (
    PlannedKernel,
    decode_kernel,
    decode_spec,
    hopper_decode_kernel,
    multiprocessors,
)
from attention.planner.costs import STANDARD, DeviceCosts, device_costs, shipped_costs
from attention.planner.queued_plans import plan_fa3, plan_greedy
from attention.planner.simulation import combine_time, lower_bound, program_loads
from attention.planner.split_plan import EIGHTHS, HostSplitPlan, Int32Array, SplitPlanSpec
from attention.planner.stream_k import plan_stream_k

Planner = Callable[[Int32Array, Int32Array, SplitPlanSpec], HostSplitPlan]
PLANNERS: dict[str, Planner] = {
    "stream-k": plan_stream_k,
    "greedy": plan_greedy,
    "fa3": plan_fa3,
}
FA3 = "fa3"
H100_SMS, H100_CAPABILITY = 132, (9, 0)


@dataclass(frozen=True, slots=True)
class PicturedPlan:
    """Times in blocks: that in which a program reads one, while all read."""

    planner: str
    makespan: float
    combine: float  # after it, of the partial results
    programs: list[list[tuple[int, int]]]  # as of program_loads


@dataclass(frozen=True, slots=True)
class WavePicture:
    spec: SplitPlanSpec
    lower_bound: float  # of the makespan of every plan, in blocks
    plan: PicturedPlan
    fa3: PicturedPlan


@dataclass(frozen=True, slots=True)
class PicturedDevice:
    """The GPU whose plans are shown: this machine's, or an H100 where there is none."""

    name: str
    runs_here: bool  # False: the plan that it would get there
    sms: int
    shape: Shape
    kernel: PlannedKernel
    planner: str
    costs: DeviceCosts
    specs: dict[int, SplitPlanSpec]  # by CTAs per SM

    @classmethod
    def of(cls, device: torch.device, choice: BackendChoice, shape: Shape) -> PicturedDevice | None:
        """For the back end of `choice` on `device`; None if an H100 would not plan this shape."""
        if device.type == "cuda" and choice.backend == "flash2":
            kernel = decode_kernel(choice.decode, shape, 1)
            name, sms = torch.cuda.get_device_name(device), multiprocessors(device)
            specs = {ctas: decode_spec(kernel, shape, device, 0, 1, ctas) for ctas in kernel.grids}
            costs = device_costs(name, kernel.name)
            return cls(name, True, sms, shape, kernel, choice.planner, costs, specs)
        return cls._of_h100(shape)

    @classmethod
    def _of_h100(cls, shape: Shape) -> PicturedDevice | None:
        if shape.dtype == torch.float32:  # the type of CPUs; GPUs run the same model in bfloat16
            shape = replace(shape, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
        choice = dispatch(Machine(H100_CAPABILITY), "auto", shape)
        if choice.decode != "decode_hopper":
            return None
        kernel = hopper_decode_kernel(_not_here, shape, shape.group)
        costs = shipped_costs(STANDARD, kernel.name)
        specs = {
            ctas: costs.spec(
                kv_heads=shape.kv_heads,
                programs=H100_SMS * ctas,
                group=shape.group,
                head_dim=shape.head_dim,
                item_bytes=shape.kv_dtype.itemsize,
                block=kernel.block_n,
            )
            for ctas in kernel.grids
        }
        return cls(STANDARD, False, H100_SMS, shape, kernel, choice.planner, costs, specs)

    def picture(self, kv_lens: Sequence[int]) -> WavePicture:
        """Of a step that decodes rows with so many positions of KV, one token each."""
        spec = self.specs[self.kernel.step_ctas_per_sm(len(kv_lens))]
        cu_seqlens_q = np.arange(len(kv_lens) + 1, dtype=np.int32)
        cache_seqlens = np.array(kv_lens, dtype=np.int32)

        def pictured(name: str) -> PicturedPlan:
            plan = PLANNERS[name](cu_seqlens_q, cache_seqlens, spec)
            programs = program_loads(plan, spec)
            longest = max(sum(cost for _, cost in program) for program in programs)
            return PicturedPlan(name, longest / EIGHTHS, combine_time(plan, spec), programs)

        bound = lower_bound(cu_seqlens_q, cache_seqlens, spec)
        return WavePicture(spec, bound, pictured(self.planner), pictured(FA3))

    def block_us(self, spec: SplitPlanSpec) -> float:
        """The time of a block, in which `spec` counts."""
        return self.costs.block_us(
            block=spec.block,
            head_dim=self.shape.head_dim,
            item_bytes=self.shape.kv_dtype.itemsize,
            programs=spec.programs,
        )


def _not_here(*arguments: object) -> None:
    raise AssertionError("the kernel of a device that is only pictured")
