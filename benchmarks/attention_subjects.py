"""What is measured: each subject prepares a case once and returns the call that is timed.

Plans and tiles are made beforehand: an engine makes them once a step for all layers, and they are
timed by themselves (attention_plans.py).  The call includes the combine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.backend import Capacity, Shape, choose
from attention.kernels.decode import decode, decode_config
from attention.kernels.prefill import prefill, prefill_config
from attention.kernels.prefill_hopper import hopper_config, prefill_hopper
from attention.planner.costs import DeviceCosts, device_costs
from attention.planner.fa3 import plan_fa3
from attention.planner.greedy import plan_greedy
from attention.planner.plan import HostPlan, Ints, PlanSpec, SplitPlan
from attention.planner.simulate import combine_time, makespan
from attention.planner.tiles import TilePlan, TileSpec, plan_tiles
from attention.planner.uneven import plan_uneven
from benchmarks.attention_cases import MAX_DECODE, Case
from benchmarks.attention_inputs import DTYPES, Inputs

CPU_PROGRAMS = 4  # of a machine without multiprocessors, in tests


class NotHere(ValueError):
    """The subject does not serve this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """call(set) is what is timed; result() is compared with the other subjects', None: it cannot
    be, its inputs are others."""

    call: Callable[[int], Tensor]
    result: Callable[[], Tensor] | None
    predicted_us: float = 0.0  # of the plan, by simulation; 0: no plan


Subject = Callable[[Inputs], Prepared]
PLANNERS: dict[str, Callable[[Ints, Ints, PlanSpec], HostPlan]] = {
    "uneven": plan_uneven,
    "greedy": plan_greedy,
    "fa3": plan_fa3,
}


def host_lengths(case: Case) -> tuple[Ints, Ints]:
    """(cu_seqlens_q [B + 1], cache_seqlens [B]) in host memory."""
    cu_seqlens_q = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    return cu_seqlens_q, np.array(case.kv_lens, dtype=np.int32)


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def costs_of(device: torch.device) -> DeviceCosts:
    """What the planners charge on the device."""
    return device_costs(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def decode_spec(case: Case, device: torch.device) -> PlanSpec:
    """The plan's parameters for the decode kernel's own configuration."""
    max_q_len = max((q_len for q_len in case.q_lens if q_len <= MAX_DECODE), default=1)
    config = decode_config(case.head_dim, DTYPES[case.dtype], case.group * max_q_len)
    return costs_of(device).spec(
        kv_heads=case.kv_heads,
        programs=multiprocessors(device) * config.resident,
        group=case.group,
        head_dim=case.head_dim,
        item_bytes=case.item_bytes,
        block=config.block_n,
        max_q_len=max_q_len,
        window=case.window,
    )


def decode_plan(case: Case, planner: str, device: torch.device) -> tuple[SplitPlan, HostPlan]:
    """The case's plan on the device and on the host."""
    spec = decode_spec(case, device)
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


def tile_spec(case: Case, device: torch.device, *, hopper: bool = False) -> TileSpec:
    """The tile plan's parameters for the configuration of a prefill kernel."""
    plain = prefill_config(case.head_dim, DTYPES[case.dtype])
    return TileSpec(
        kv_heads=case.kv_heads,
        group=case.group,
        programs=multiprocessors(device) * (1 if hopper else plain.resident),
        min_q_len=MAX_DECODE + 1,
        window=case.window,
        block_m=128 if hopper else plain.block_m,
        block_n=hopper_config(case.head_dim).block_n if hopper else plain.block_n,
    )


def prefill_tiles(case: Case, device: torch.device, *, hopper: bool) -> TilePlan:
    """The case's tiles for rows that the decode kernel does not serve."""
    spec = tile_spec(case, device, hopper=hopper)
    tiles = TilePlan.allocate(
        spec, max_tokens=case.tokens, max_rows=case.rows, head_dim=case.head_dim, device=device
    )
    tiles.load(plan_tiles(*host_lengths(case), spec))
    return tiles


def features_of(inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments that every kernel takes."""
    return {
        "scale": inputs.scale,
        "softcap": inputs.case.softcap,
        "sinks": inputs.sinks,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
    }


def predicted_us(plan: HostPlan, spec: PlanSpec, case: Case, device: torch.device) -> float:
    """The simulated time of the plan, launch and combine included."""
    costs = costs_of(device)
    units = makespan(plan, spec, costs.rho) + combine_time(plan, spec)
    block_us = costs.block_us(
        block=spec.block,
        head_dim=case.head_dim,
        item_bytes=case.item_bytes,
        programs=spec.programs,
    )
    return costs.launch_us + units * block_us


def kernels(planner: str, *, hopper: bool = False) -> Subject:
    """The decode kernel with one planner's plan; for rows of many tokens a prefill kernel, the
    plain one or Hopper's."""

    def prepare(inputs: Inputs) -> Prepared:
        case, device, features = inputs.case, inputs.q.device, features_of(inputs)
        plan = tiles = None
        predicted = 0.0
        if min(case.q_lens) <= MAX_DECODE:
            plan, host = decode_plan(case, planner, device)
            predicted = predicted_us(host, plan.spec, case, device)
        if max(case.q_lens) > MAX_DECODE:
            tiles = prefill_tiles(case, device, hopper=hopper)
        prefill_kernel = prefill_hopper if hopper else prefill

        def call(number: int) -> Tensor:
            tensors = (inputs.q, inputs.k, inputs.v, inputs.tables[number])
            if plan is not None:
                decode(*tensors, plan, inputs.out, **features)
            if tiles is not None:
                prefill_kernel(*tensors, tiles, inputs.out, **features)
            return inputs.out

        return Prepared(call, lambda: call(0), predicted)

    return prepare


def back_end(name: str) -> Subject:
    """What `--attention name` runs, through Backend.plan and Backend.attend."""

    def prepare(inputs: Inputs) -> Prepared:
        case, device = inputs.case, inputs.q.device
        shape = Shape(
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            page_size=case.page,
            dtype=inputs.q.dtype,
            kv_dtype=inputs.k.dtype,
        )
        capacity = Capacity(rows=case.rows, tokens=case.tokens)
        chosen = choose(device, name, shape, capacity, windows=(case.window,))
        metas = [chosen.plan(inputs.meta(number), inputs.kv) for number in range(inputs.sets)]
        features = {"scale": inputs.scale, "softcap": case.softcap, "sinks": inputs.sinks}

        def call(number: int) -> Tensor:
            return chosen.attend(
                inputs.q, inputs.kv, 0, metas[number], window=case.window, **features
            )

        return Prepared(call, lambda: call(0))

    return prepare
