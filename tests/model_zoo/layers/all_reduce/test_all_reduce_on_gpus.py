"""The waits and the bits of the all-reduce on GPUs: two streams, and processes, of one; two."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.gpu


def run(*arguments: str) -> str:
    """In a process of its own: a wait that never ends would hang this one."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("rows", [1, 8, 100, 2048])
def test_two_streams_of_a_gpu_get_the_same_bits_and_one_alone_gives_up(rows: int):
    said = run("tests.support.parallel.two_streams", str(rows), "200")
    assert said.split("\n")[:2] == ["equal", "gave up"]


def test_the_check_of_two_processes_of_a_gpu_finds_what_is_wrong():
    assert "right, silent, wrong" in run("tests.support.parallel.two_processes")


def test_gemms_of_two_processes_of_a_gpu_add_and_send_as_norms_do():
    assert "equal" in run("tests.support.parallel.two_processes_of_layers")


@pytest.mark.slow
def test_two_gpus_get_the_same_bits_in_every_replay():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert "equal" in run("tests.support.parallel.two_gpus", "200")
