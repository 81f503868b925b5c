"""What is chosen where the operator leaves the choice to us."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import FAMILIES
from model_zoo.config import ModelConfig, read_config
from runtime.config import ConfigError, EngineConfig
from runtime.executor.transfers import Download
from runtime.startup import device
from runtime.startup.device import (
    DTYPES,
    choose_device,
    choose_dtype,
    choose_threads,
    physical_cores,
)
from runtime.startup.fit.target import FitQuery, target_device
from runtime.startup.format_report import FormatQuery, target_of

CPU = torch.device("cpu")


def tiny_config() -> ModelConfig:
    return read_config(Path("model_zoo/tiny_chat"))


@pytest.mark.parametrize(
    ("requested", "model", "has_bfloat16", "chosen"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float16", True, "float32"),
        ("auto", "float32", True, "float32"),
        ("float16", "bfloat16", True, "float16"),
    ],
)
def test_cpu_computes_in_the_type_it_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, requested: str, model: str, has_bfloat16: bool, chosen: str
) -> None:
    monkeypatch.setattr(device, "_cpu_has_bfloat16", lambda: has_bfloat16)
    config = replace(tiny_config(), dtype=model)
    assert choose_dtype(requested, config, CPU) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "has_bfloat16", "chosen"),
    [("bfloat16", True, "bfloat16"), ("float16", True, "bfloat16"), ("bfloat16", False, "float32")],
)
def test_a_model_whose_activations_exceed_float16_is_not_run_in_it(
    monkeypatch: pytest.MonkeyPatch, model: str, has_bfloat16: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: has_bfloat16)
    gpu = torch.device("cuda")
    config = replace(tiny_config(), dtype=model, fits_float16=False)
    assert choose_dtype("auto", config, gpu) == chosen
    with pytest.raises(ConfigError, match=r"--dtype float16: .* use bfloat16 or float32"):
        choose_dtype("float16", config, gpu)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({}, "bfloat16"), ({"dtype": "float16"}, "bfloat16"), ({"dtype": "float32"}, "float32")],
)
def test_reports_of_a_gpu_that_is_not_there_have_the_type_of_a_start(
    tmp_path: Path, fields: dict[str, str], dtype: str
) -> None:
    """Of a model whose activations exceed float16."""
    directory = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Gemma 3 4B"] | fields))
    config, requested = read_config(tmp_path), EngineConfig(model=directory)
    assert target_device(FitQuery(config=requested, card=1 << 36), config).dtype == dtype
    formats = FormatQuery(config=requested, capability=(9, 0))
    assert target_of(formats, config).dtype == DTYPES[dtype]
    half = EngineConfig(model=directory, dtype="float16")
    for report in (
        lambda: target_device(FitQuery(config=half, card=1 << 36), config),
        lambda: target_of(FormatQuery(config=half, capability=(9, 0)), config),
    ):
        with pytest.raises(ConfigError, match="--dtype float16"):
            report()


def test_one_core_is_left_to_the_api_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr(device, "physical_cores", lambda cores=cores: cores)
        assert choose_threads(0) == threads
        assert choose_threads(5) == 5


def test_cores_are_counted_within_the_quota_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = physical_cores()
    monkeypatch.setattr(device, "_cpu_quota", lambda: 0.5)
    assert physical_cores() == 1 <= whole


def test_device_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="--device cuda"):
        choose_device("cuda")


def test_gpus_that_the_environment_names_and_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "has_driver", lambda: True)
    monkeypatch.setattr(device, "ask_driver", lambda: (device.NO_DEVICE, 0))
    for named in ("7", "GPU-1f", "cuda:0", "gpu1", "abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={named}: PyTorch sees no"):
            choose_device("auto")
        assert choose_device("cpu") == CPU
    for hidden in ("", "-1", "NoDevFiles", "none", "void"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto") == CPU


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((100, 0), "name one of this machine"),
        ((0, 2), r"the driver sees 2, and may be too old for this build of torch \(CUDA 13.0\)"),
        ((999, 0), r"the driver does not start \(cuInit: error 999\)"),
    ],
)
def test_the_driver_is_asked_why_no_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "has_driver", lambda: True)
    monkeypatch.setattr(device, "ask_driver", lambda: answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=message):
        choose_device("auto")


def test_without_a_driver_no_gpu_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several engines gets one, on a machine that has none, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(device, "has_driver", lambda: False)
    assert choose_device("auto") == CPU


def test_free_memory_is_a_number_of_bytes_that_this_host_could_have() -> None:
    assert 2**20 < device.free_bytes(CPU) < 2**46


def test_files_that_a_container_has_read_leave_its_memory_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("9000000\n")
    (tmp_path / "memory.current").write_text("8000000\n")
    (tmp_path / "memory.stat").write_text("anon 2000000\ninactive_file 5000000\nslab 5\n")
    assert device.free_bytes(CPU) == 6_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_bytes(CPU) > 2**23


def test_step_without_results_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert Download([], torch.device("cuda")).wait() == []
    assert calls == ["record", "synchronize"]
    assert Download([], CPU).wait() == []
    assert len(calls) == 2


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="for glibc's allocator")
def test_memory_that_a_step_frees_is_there_for_the_next_one() -> None:
    code = """
import resource
import numpy as np
from runtime.startup.device import keep_freed_memory
keep_freed_memory()
def step():
    for megabytes in (11, 40, 23, 70):
        np.ones(megabytes << 20, dtype=np.uint8)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(found.stdout) < 1000, "pages of 4 KiB: 36,000 a step are new otherwise"
