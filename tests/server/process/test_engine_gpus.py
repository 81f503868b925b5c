"""Which GPU each of several engines gets, and how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.config import EngineConfig
from server.process.engine_process import gpus_of_engine, num_gpus, visible_devices
from server.visible_gpus import VisibleDevicesError, expanded


def test_an_engine_sees_the_gpu_of_its_index_among_those_of_the_server():
    assert visible_devices(1, 1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    listed = {"CUDA_VISIBLE_DEVICES": "4,GPU-ab"}
    assert visible_devices(1, 1, listed) == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}


def test_an_engine_of_two_ranks_sees_two_gpus():
    assert visible_devices(1, 2, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    listed = {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}
    assert visible_devices(0, 2, listed) == {"CUDA_VISIBLE_DEVICES": "7,5"}


def test_an_engine_of_auto_sees_its_share_of_the_gpus():
    config = EngineConfig(model="m", data_parallel=2, tensor_parallel=0)
    assert [gpus_of_engine(config, gpus) for gpus in (8, 5, 1)] == [4, 2, 1]
    assert gpus_of_engine(replace(config, tensor_parallel=3), 8) == 3


def test_ranges_are_gpus_and_nothing_is_seen_from_a_negative_number_on():
    listed = {"CUDA_VISIBLE_DEVICES": "4-6, GPU-1-2,-1,9"}
    assert [visible_devices(index, 2, listed)["CUDA_VISIBLE_DEVICES"] for index in (0, 1, 2)] == [
        "4,5",
        "6,GPU-1-2",
        "",
    ]


def test_cuda_gets_the_gpus_of_ranges_one_by_one():
    assert expanded({"CUDA_VISIBLE_DEVICES": "0-2, 5"}) == {"CUDA_VISIBLE_DEVICES": "0,1,2,5"}
    assert expanded({"CUDA_VISIBLE_DEVICES": "GPU-1-2,3"}) == expanded({}) == {}


@pytest.mark.parametrize("value", ["3-0", "1,5-4", "0-99999999999"])
def test_ranges_that_no_host_has_are_refused(value: str):
    with pytest.raises(VisibleDevicesError, match=f"^CUDA_VISIBLE_DEVICES={value}: the range"):
        expanded({"CUDA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0-3"}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_gpus_are_counted_without_asking_the_driver(
    tmp_path: Path, environment: dict[str, str], expected: int
):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(environment, tmp_path) == expected


def test_a_machine_without_device_files_says_nothing_of_gpus(tmp_path: Path):
    assert num_gpus({}, tmp_path) is None
