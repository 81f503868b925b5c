"""The planners' costs: shipped, measured on the device, and read from that device's file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.backend import UnsupportedAttention
from attention.dispatch import DECODE, Machine, dispatch
from attention.planned_kernel import decode_kernel
from attention.planner import tuning
from attention.planner.costs import (
    SHIPPED,
    STANDARD,
    DeviceCosts,
    device_costs,
    read_tuned,
    tuned_file,
    write_tuned,
)
from attention.planner.simulation import makespan
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlanSpec
from attention.planner.timing import GROUP, HEAD_DIM, SHAPE, follows, kernels_of

COSTS = DeviceCosts(read_tbs=2.0, launch_us=4.0, piece_us=1.5, merge_us=0.5, merge_tbs=5.0, rho=1.5)


def written(**changed: object) -> str:
    """A file of COSTS with other fields; None: without the field."""
    values = {name: x for name, x in (asdict(COSTS) | changed).items() if x is not None}
    return json.dumps({"NVIDIA H200": {"decode": values}})


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_costs_are_shipped_for_every_decode_kernel(device: str):
    names = [kernel.name for kernel in DECODE]
    assert SHIPPED[device].keys() == SHIPPED[STANDARD].keys() >= set(names)
    assert [decode_kernel(name, SHAPE, 1).name for name in names] == names


def test_the_kernels_that_are_measured_are_those_that_run():
    assert kernels_of(Machine((8, 0))) == ["decode"]
    hopper = [dispatch(Machine((9, 0)), "auto", SHAPE).decode, "decode"]
    assert kernels_of(Machine((9, 0))) == list(dict.fromkeys(hopper))
    assert all(follows("decode", planner) for planner in tuning.PLANNERS)


def test_measured_costs_go_before_shipped_ones_kernel_by_kernel(tmp_path: Path):
    file = tmp_path / "deeper" / "planner.json"
    assert device_costs("NVIDIA H200", file=file) == SHIPPED["NVIDIA H200"]["decode"]
    assert device_costs("Brand-new", file=file) == SHIPPED[STANDARD]["decode"]
    write_tuned(file, "NVIDIA H200", {"decode": COSTS})
    slower = replace(COSTS, read_tbs=1.0)
    write_tuned(file, "Brand-new", {"decode": slower, "decode_hopper": COSTS})
    write_tuned(file, "Brand-new", {"decode_hopper": slower})
    assert device_costs("NVIDIA H200", file=file) == COSTS
    shipped = SHIPPED["NVIDIA H200"]["decode_hopper"]
    assert device_costs("NVIDIA H200", "decode_hopper", file=file) == shipped
    assert device_costs("Brand-new", file=file) == slower
    assert device_costs("Brand-new", "decode_hopper", file=file) == slower
    assert [path.name for path in file.parent.iterdir()] == ["planner.json"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", r"Expecting property name"),
        ("[" * 100_000, r"recursion"),
        ("[1]", r"the file is no JSON object"),
        ('{"NVIDIA H200": {"read_tbs": 3.0}}', r"NVIDIA H200, read_tbs is no JSON object"),
        (written(read_tbs=None), r"NVIDIA H200, decode lacks read_tbs"),
        (written(cost=3), r"NVIDIA H200, decode has cost"),
        (written(rho=0), r"rho of NVIDIA H200, decode is 0, not a number from 0 to 10000"),
        (written(rho="2"), r"rho of NVIDIA H200, decode is '2', not a number"),
        (written(rho=True), r"rho of NVIDIA H200, decode is True, not a number"),
        (written(read_tbs=1e300), r"read_tbs of NVIDIA H200, decode is 1e\+300, not a number"),
        (written(rho=float("nan")), r"rho of NVIDIA H200, decode is nan, not a number"),
        ("\udcff", r"codec can't decode"),
    ],
)
def test_a_file_that_tune_did_not_write_is_refused_with_the_place_and_the_remedy(
    tmp_path: Path, text: str, found: str
):
    file = tmp_path / "planner.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    message = rf"planner\.json: not what .*\(.*{found}.*\): run it again or delete"
    with pytest.raises(UnsupportedAttention, match=message):
        device_costs("NVIDIA H200", file=file)
    write_tuned(file, "NVIDIA H200", {"decode": COSTS})
    assert read_tuned(file) == {"NVIDIA H200": {"decode": COSTS}}


def test_the_file_is_in_the_users_cache():
    assert tuned_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/wavefill/planner.json")
    assert tuned_file({"XDG_CACHE_HOME": "c"}) == Path.home() / ".cache/wavefill/planner.json"


def test_a_user_without_a_home_has_a_file_of_choices_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def no_user(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_user)
    assert tuned_file({}) == Path("~/.cache/wavefill/planner.json")


@pytest.mark.parametrize("kernel", [kernel.name for kernel in DECODE])
def test_calibration_finds_the_costs_of_a_device_that_keeps_to_the_model(kernel: str, capsys):
    subject = decode_kernel(kernel, SHAPE, 1)
    spec = tuning.spec_of(COSTS, subject, 132)
    block_us = COSTS.block_us(
        block=spec.block, head_dim=HEAD_DIM, item_bytes=2, programs=spec.programs
    )
    partial_us = GROUP * HEAD_DIM * 8 * spec.programs / (COSTS.merge_tbs * 1e6)
    exact = replace(spec, work_tile_cost=0)  # a plan's costs are rounded to eighths of a block

    def timer(plan: HostSplitPlan, _: SplitPlanSpec, lengths: Int32Array) -> float:
        assert not plan.queued and len(lengths)
        work_tiles = int(np.diff(plan.starts).max())
        partials = int(plan.work[:, 7].sum())
        merge = (partials > 0) * COSTS.merge_us + partials / spec.programs * partial_us
        reading = makespan(plan, exact, COSTS.rho) * block_us
        return COSTS.launch_us + work_tiles * COSTS.piece_us + reading + merge

    found = asdict(tuning.measure(timer, spec))
    assert found == pytest.approx(asdict(COSTS), rel=0.02)


def test_plans_are_charged_in_eighths_of_a_block():
    spec = COSTS.spec(
        kv_heads=8, programs=264, group=4, head_dim=128, item_bytes=2, block=64, max_q_len=2
    )
    block_us = 2 * 64 * 128 * 2 * 264 / 2e6
    assert spec.work_tile_cost == round(8 * 1.5 / block_us) == 3
    assert spec.merge_cost == round(8 * 0.5 / block_us) == 1
    partial_us = 2 * 4 * 128 * 8 * 264 / 5e6
    assert spec.merge_tile_cost == round(8 * partial_us / block_us) == 1


def test_tune_refuses_to_measure_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert tuning.main([]) == 1
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert tuning.main([]) == 1
    assert "compute capability 8.0 or more, this device has 7.0" in capsys.readouterr().err
