"""The trial of the Hopper kernels at a start: on interpreted kernels, and on a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.delta_net.hopper import choose, run
from model_zoo.layers.delta_net.hopper.trial import (
    ROWS,
    TrialRow,
    TrialStep,
    difference,
    trial_step,
    without_snapshots,
)
from model_zoo.layers.delta_net.tiles import PromptTiles
from model_zoo.layers.linear_factory import LinearFactory
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("poisoned_memory", "hopper_kernels")
FP32 = torch.float32
FEW = (TrialRow(70, 0, 64), TrialRow(1, 63), TrialRow(12, 60, 64), TrialRow(9, has_slot=False))
BY_TRITON = PromptTiles()
BY_HOPPER = [
    PromptTiles(scan_hopper=True),
    PromptTiles(local_hopper=True, scan_hopper=True),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, where the interpreter runs them."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)


def step_of(rows: tuple[TrialRow, ...], device: str) -> TrialStep:
    config = DeltaNetConfig(layers=(0,), key_heads=1, value_heads=2)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    return trial_step(config, dtype, FP32, rows, padding=3, device=torch.device(device))


def test_kernels_whose_results_are_the_same_are_right(device: str):
    step = step_of(FEW if device == "cpu" else ROWS, device)
    candidates = [BY_TRITON, *BY_HOPPER]
    assert choose.right_candidates(step, candidates) == candidates


def test_steps_without_snapshots_have_kernels_of_their_own(device: str):
    step = step_of(tuple(without_snapshots(FEW)), device)
    assert step.rows.snapshots is None
    candidates = [BY_TRITON, *BY_HOPPER]
    assert choose.right_candidates(step, candidates) == candidates


@pytest.mark.parametrize("fault", ["state", "conv", "out"])
def test_a_kernel_with_a_wrong_row_is_left_out_with_a_warning(
    device: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """One snapshot, one input of the convolution or one token is wrong."""
    scan = run.scan_hopper

    def wrong(chunked, state, rows, plan, out, programs) -> None:
        scan(chunked, state, rows, plan, out, programs)
        kept = int(rows.snapshots.slots[0, 0])
        if fault == "state":
            state.state[kept] *= 1.1
        elif fault == "conv":
            state.conv[kept, 0, 0] += 1
        else:
            out[5, :64] *= 1.5  # half of a head: the norm that follows would hide a whole one

    monkeypatch.setattr(run, "scan_hopper", wrong)
    found = choose.right_candidates(step_of(FEW, device), [BY_TRITON, BY_HOPPER[1]])
    assert found == [BY_TRITON]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "scan_hopper=True" in record.getMessage()


def test_a_kernel_that_does_not_compile_is_left_out_with_a_warning(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*arguments: object) -> None:
        raise RuntimeError("PassManager::run failed\nand more")

    monkeypatch.setattr(run, "local_hopper", fail)
    step = step_of(FEW, device)
    assert choose.right_candidates(step, [BY_TRITON, BY_HOPPER[1]]) == [BY_TRITON]
    assert caplog.messages[0].endswith("is not used: PassManager::run failed")


def test_a_token_that_is_nan_is_infinitely_far(device: str):
    step = step_of(FEW, device)
    expected = step.outcome(BY_TRITON)
    found = replace(expected, out=expected.out.clone())
    assert difference(found, expected) == 0
    found.out[3, 4] = float("nan")
    assert difference(found, expected) == float("inf")


def layer_of(dtype: torch.dtype) -> DeltaNet:
    config = DeltaNetConfig(layers=(0,), key_heads=2, value_heads=6)
    linears = LinearFactory(dtype=dtype)
    return DeltaNet(config, index=0, name="mixer", hidden=256, eps=1e-6, linears=linears)


def test_a_trial_has_weights_of_the_types_of_a_layer():
    """Else a start would compile its kernels twice."""
    layer, step = layer_of(torch.float16), step_of(FEW, "cpu")
    for name in ("conv", "a_log", "dt_bias", "norm"):
        assert getattr(step.weights, name).dtype == getattr(layer, name).dtype


def test_a_cpu_has_no_choice():
    layer = layer_of(torch.bfloat16)
    before = layer.tiles
    assert choose.choose_delta_net(nn.ModuleList([layer]), FP32) == "" and layer.tiles == before


@pytest.mark.gpu
def test_a_start_chooses_for_all_layers(caplog: pytest.LogCaptureFixture):
    model = nn.ModuleList([layer_of(torch.bfloat16).cuda() for _ in range(2)])
    said = choose.choose_delta_net(model, FP32)
    assert not caplog.records
    first, second = model
    assert isinstance(first, DeltaNet) and isinstance(second, DeltaNet)
    assert first.tiles == second.tiles and first.tiles is not None
    by = "Triton" if first.tiles == BY_TRITON else "Hopper"
    assert said == f"prompts by {by} kernels"


COMPILED = """
import torch
from torch import nn
from triton import knobs

from model_zoo.layers.delta_net.hopper import choose
from runtime.precompile.compiling import compiling_only
from tests.model_zoo.layers.delta_net.test_hopper_choice import layer_of

compiled = []
knobs.compilation.listener = lambda src, **rest: compiled.append(src.name)
model = nn.ModuleList([layer_of(torch.bfloat16).cuda()])
with compiling_only() as optional, optional():
    choose.run_delta_net_candidates(model, torch.float32)
before = len(compiled)
choose.choose_delta_net(model, torch.float32)
print(before, compiled[before:])
"""


@pytest.mark.gpu
def test_what_a_start_has_compiled_in_parallel_is_all_that_the_choice_runs(tmp_path: Path):
    """In a process of its own: this one has compiled them."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    before, _, after = done.stdout.strip().partition(" ")
    assert int(before) > 4 and after == "[]"
