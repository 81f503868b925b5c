"""Which GPU each of several engines gets, and how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.process.engine_process import num_gpus, visible_devices


def test_an_engine_sees_the_gpu_of_its_index_among_those_of_the_server():
    assert visible_devices(1, 1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    listed = {"CUDA_VISIBLE_DEVICES": "4,GPU-ab"}
    assert visible_devices(1, 1, listed) == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}


def test_an_engine_of_two_ranks_sees_two_gpus():
    assert visible_devices(1, 2, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    listed = {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}
    assert visible_devices(0, 2, listed) == {"CUDA_VISIBLE_DEVICES": "7,5"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, 2), ({"CUDA_VISIBLE_DEVICES": "5"}, 1), ({"CUDA_VISIBLE_DEVICES": ""}, 0)],
)
def test_gpus_are_counted_without_asking_the_driver(
    tmp_path: Path, environment: dict[str, str], expected: int
):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(environment, tmp_path) == expected


def test_a_machine_without_device_files_says_nothing_of_gpus(tmp_path: Path):
    assert num_gpus({}, tmp_path) is None
