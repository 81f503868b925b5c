"""Subjects: each prepares a case once and returns the call that is timed.

Plans are precomputed, since an engine makes them once per step for all layers; plans.py times them.
The call includes the combine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attention.backend import Capacity, Shape
from attention.common.kernel_inputs import KernelInputs
from attention.dispatch import TABLE, Machine, choose, dispatch
from attention.planned_kernel import (
    PlannedKernel,
    decode_kernel,
    decode_spec,
    mixed_kernel,
    prefill_kernel,
    tile_spec,
)
from attention.planner.costs import device_costs
from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.simulation import combine_time, makespan
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlan, SplitPlanSpec
from attention.planner.tuning import PLANNERS
from benchmarks.attention.cases import MAX_DECODE, AttentionCase
from benchmarks.attention.inputs import DTYPES, Inputs


class PeerUnavailable(ValueError):
    """The subject does not serve this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """call(set) is timed; result() is compared with other subjects', None: not comparable."""

    call: Callable[[int], Tensor]
    result: Callable[[], Tensor] | None
    predicted_us: float = 0.0  # of the plan, by simulation; 0: no plan
    kernels: str = ""  # that run, where a table chose them


Subject = Callable[[Inputs], Prepared]


def host_lengths(case: AttentionCase) -> tuple[Int32Array, Int32Array]:
    """(cu_seqlens_q [B + 1], cache_seqlens [B]) in host memory."""
    cu_seqlens_q = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    return cu_seqlens_q, np.array(case.kv_lens, dtype=np.int32)


def shape_of(case: AttentionCase) -> Shape:
    return Shape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page,
        dtype=DTYPES[case.dtype],
        kv_dtype=DTYPES[case.kv_dtype or case.dtype],
    )


def decode_tokens(case: AttentionCase) -> int:
    """The largest q_len of a decode row."""
    return max((q_len for q_len in case.q_lens if q_len <= MAX_DECODE), default=1)


def decoding(
    case: AttentionCase, planner: str, device: torch.device, *, plain: bool = False
) -> tuple[PlannedKernel, SplitPlanSpec]:
    """The decode kernel and the spec of its plans.

    plain: the table's last kernel, which serves every shape, instead of the selected one
    """
    shape, tokens = shape_of(case), decode_tokens(case)
    name = TABLE["flash2"][0][-1].name
    if not plain:  # to a kernel, more tokens a row are more heads that share a KV head
        packed = replace(shape, heads=shape.heads * tokens)
        name = dispatch(Machine.of(device), "flash2", packed, planner).decode
    kernel = decode_kernel(name, shape, tokens)
    ctas_per_sm = kernel.step_ctas_per_sm(case.rows)
    return kernel, decode_spec(kernel, shape, device, case.window, tokens, ctas_per_sm)


def prompting(
    case: AttentionCase, device: torch.device, *, plain: bool = False
) -> tuple[PlannedKernel, TileSpec]:
    """The prefill kernel and the spec of its tile plans; plain: the table's last kernel."""
    shape = shape_of(case)
    name = TABLE["flash2"][1][-1].name
    if not plain:
        name = dispatch(Machine.of(device), "flash2", shape).prefill
    kernel = prefill_kernel(name, shape)
    return kernel, tile_spec(kernel, shape, device, case.window, MAX_DECODE)


def decode_plan(
    case: AttentionCase, planner: str, spec: SplitPlanSpec, device: torch.device
) -> tuple[SplitPlan, HostSplitPlan]:
    """The case's plan on the device and on the host."""
    host = PLANNERS[planner](*host_lengths(case), spec)
    plan = SplitPlan.allocate(
        spec,
        max_rows=case.rows,
        group=case.group,
        head_dim=case.head_dim,
        queued=host.queued,
        device=device,
    )
    plan.load(host)
    return plan, host


def prefill_tiles(case: AttentionCase, spec: TileSpec, device: torch.device) -> TilePlan:
    """The case's tiles on the device."""
    tiler = DeviceTiler(
        spec, max_tokens=case.tokens, max_rows=case.rows, head_dim=case.head_dim, device=device
    )
    return tiler.plan(*(torch.from_numpy(lens).to(device) for lens in host_lengths(case)))


def kernel_inputs(inputs: Inputs, number: int) -> KernelInputs:
    """The kernels' inputs over one of the sets."""
    return KernelInputs(
        inputs.q, inputs.k, inputs.v, inputs.tables[number], inputs.out, scale=inputs.scale,
        softcap=inputs.case.softcap, sinks=inputs.sinks, k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
    )  # fmt: skip


def predicted_us(
    plan: HostSplitPlan,
    spec: SplitPlanSpec,
    case: AttentionCase,
    device: torch.device,
    kernel: PlannedKernel,
) -> float:
    """The simulated time of the kernel with the plan, launch and combine included."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    costs = device_costs(name, kernel.name)
    units = makespan(plan, spec, costs.rho) + combine_time(plan, spec)
    block_us = costs.block_us(
        block=spec.block,
        head_dim=case.head_dim,
        item_bytes=case.item_bytes,
        programs=spec.programs,
    )
    return costs.launch_us + units * block_us


def kernels(planner: str, *, plain: bool = False) -> Subject:
    """The decode kernel with one planner's plan, the prefill kernel for rows of many tokens.

    They are those that the table chooses, or the plain ones.
    """

    def prepare(inputs: Inputs) -> Prepared:
        case, device = inputs.case, inputs.q.device
        work: list[tuple[PlannedKernel, SplitPlan | TilePlan]] = []
        predicted = 0.0
        if min(case.q_lens) <= MAX_DECODE:
            kernel, spec = decoding(case, planner, device, plain=plain)
            plan, host = decode_plan(case, planner, spec, device)
            predicted = predicted_us(host, spec, case, device, kernel)
            work.append((kernel, plan))
        if max(case.q_lens) > MAX_DECODE:
            kernel, tile_spec = prompting(case, device, plain=plain)
            work.append((kernel, prefill_tiles(case, tile_spec, device)))
        mixed = mixed_kernel(*(kernel for kernel, _ in work)) if len(work) == 2 else None

        def call(number: int) -> Tensor:
            if mixed:
                mixed(kernel_inputs(inputs, number), *(plan for _, plan in work))
                return inputs.out
            for kernel, plan in work:
                kernel.run(kernel_inputs(inputs, number), plan)
            return inputs.out

        return Prepared(call, lambda: call(0), predicted, "+".join(k.name for k, _ in work))

    return prepare


def back_end(name: str) -> Subject:
    """What `--attention name` runs, through Backend.plan and Backend.attend."""

    def prepare(inputs: Inputs) -> Prepared:
        case, device = inputs.case, inputs.q.device
        capacity = Capacity(rows=case.rows, tokens=case.tokens)
        chosen = choose(device, name, shape_of(case), capacity, windows=(case.window,))
        metas = [chosen.plan(inputs.meta(number), inputs.kv) for number in range(inputs.sets)]
        features = {"scale": inputs.scale, "softcap": case.softcap, "sinks": inputs.sinks}

        def call(number: int) -> Tensor:
            return chosen.attend(
                inputs.q, inputs.kv.layers[0], metas[number], window=case.window, **features
            )

        return Prepared(call, lambda: call(0), kernels=chosen.details)

    return prepare
