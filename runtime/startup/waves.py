"""The picture of the split plan, as a message: what `runtime/engine/observer.py` asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attention.wave_picture as pictures
from attention.wave_picture import PicturedDevice
from runtime.snapshot import PlanPicture, WavePicture
from runtime.startup.engine_spec import EngineSpec


def wave_planner(engine_spec: EngineSpec) -> Callable[[list[int]], WavePicture | None] | None:
    """KV positions of the rows that decode -> their picture, in layers without a window.

    None where no GPU plans this model, or all of its layers have a window.
    """
    if all(spec.window for spec in engine_spec.config.attention_specs):
        return None
    device = PicturedDevice.of(engine_spec.device, engine_spec.choice, engine_spec.shape)
    return None if device is None else partial(_picture, device)


def _picture(device: PicturedDevice, kv_lens: list[int]) -> WavePicture:
    """Without the ids of the rows, which the caller knows."""
    found = device.picture(kv_lens)
    return WavePicture(
        device=device.name,
        runs_here=device.runs_here,
        sms=device.sms,
        programs=found.spec.programs,
        block=found.spec.block,
        block_us=device.block_us(found.spec),
        lower_bound=found.lower_bound,
        rows=[],
        kv_tokens=kv_lens,
        plan=_plan(found.plan),
        fa3=_plan(found.fa3),
    )


def _plan(plan: pictures.PicturedPlan) -> PlanPicture:
    programs = [[number for load in program for number in load] for program in plan.programs]
    return PlanPicture(plan.planner, plan.makespan, plan.combine, programs)
