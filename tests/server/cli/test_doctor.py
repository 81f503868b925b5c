"""`wavefill doctor`: each finding with its remedy, the exit code, and an end within its time."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from server.cli.commands import doctor
from server.cli.doctor import compute, gpu, system
from server.cli.doctor.check import Check, Result, output_of, run_all
from server.cli.main import main
from tests.support.cli.pseudo_terminal import pseudo_terminal
from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.server_process import free_port

WAVEFILL = Path(sys.executable).parent / "wavefill"
H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 81559, 81000, Not Active, Not Active"
LATER = 60.0
OTHER_SERVER = b'{"info": {"title": "FastAPI", "version": "0.1.0"}, "version": "0.20.0"}'


def deadline() -> float:
    return time.monotonic() + LATER


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> gpu.Gpus:
    """An nvidia-smi that prints `text`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return gpu.Gpus()


def fake_probe(monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    monkeypatch.setattr(compute, name, (sys.executable, "-c", code))


def torch_says(monkeypatch: pytest.MonkeyPatch, **found: object) -> None:
    whole = {"torch": "2.13", "cuda": "13.0", "devices": [], "computes": False, "error": ""} | found
    fake_probe(monkeypatch, "TORCH_PROBE", f"print({json.dumps(whole)!r})")


def test_this_machine_is_checked_as_json_and_the_code_is_that_of_the_port():
    words = [WAVEFILL, "doctor", "--json", "--seconds", "60"]
    done = subprocess.run([*words, "--port", str(free_port())], capture_output=True, text=True)
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert {"driver", "torch", "triton", "memory", "NVLink", "port", "clock"} < found.keys()
    assert found["torch"]["status"] == "pass", found["torch"]
    assert re.search(r"\d compiles for compute|not needed on a CPU", found["triton"]["found"])
    failed = [name for name, each in found.items() if each["status"] == "fail"]
    assert done.returncode == (1 if failed else 0), failed
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [WAVEFILL, "doctor", "--json", "--seconds", "60", "--port", port],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    entry = next(e for e in json.loads(done.stdout)["checks"] if e["check"] == "port")
    assert entry["status"] == "fail" and "another --port" in entry["remedy"]


def test_on_a_terminal_it_keeps_to_the_width_and_sums_up():
    command = (WAVEFILL, "doctor", "--seconds", "30", "--port", str(free_port()))
    with pseudo_terminal(command) as terminal:
        terminal.wait(60)
    lines = [line for line in terminal.lines if line.strip()]
    assert all(len(line) <= 80 for line in lines), lines
    assert re.match(r"(pass|warn|fail)  python +\d", lines[0])
    assert "a server" in lines[-1]
    assert "\x1b[32mpass\x1b[0m" in terminal.raw


def test_a_check_that_hangs_or_breaks_is_a_warning_and_the_others_are_reported():
    def broken(deadline: float) -> Result:
        raise KeyError("x")

    began = time.monotonic()
    results = run_all(
        [
            Check("slow", lambda deadline: Result("pass", str(time.sleep(20)))),
            Check("slow program", lambda end: Result("pass", str(output_of(("sleep", "9"), end)))),
            Check("broken", broken),
            Check("good", lambda deadline: Result("pass", "yes")),
        ],
        0.3,
    )
    assert time.monotonic() - began < 10
    assert [result.status for result in results.values()] == ["warn", "warn", "warn", "pass"]
    assert "no answer within 0.3 s" in results["slow"].found
    assert "no answer" in results["slow program"].found
    assert "KeyError" in results["broken"].found


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus = fake_smi(tmp_path, monkeypatch, H100)
    assert gpu.driver(gpus, deadline()) == Result("pass", "580.65.06: 1 x NVIDIA H100 80GB HBM3")
    assert gpu.memory(gpus, deadline()) == Result("pass", "79.1 of 79.6 GiB free")
    assert gpu.gpu_clock(gpus, deadline()).status == "pass"
    assert gpu.nvlink(gpus, deadline()).found == "not needed with one GPU"


def test_a_gpu_that_is_old_full_or_hot_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpus = fake_smi(tmp_path, monkeypatch, "Tesla V100, 550.1, 7.0, 16000, 900, Active, [N/A]")
    for check, words in (
        (gpu.driver, "7.0 of Tesla V100 is below 8.0"),
        (gpu.memory, "0.9 of 15.6 GiB free"),
        (gpu.gpu_clock, "GPU 0 is slowed down"),
    ):
        result = check(gpus, deadline())
        assert result.status == "warn" and words in result.found and result.remedy


def test_a_driver_that_does_not_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus = fake_smi(tmp_path, monkeypatch, "Driver/library version mismatch", 18)
    result = gpu.driver(gpus, deadline())
    assert result.status == "fail" and "version mismatch" in result.found
    assert "restart" in result.remedy


def test_a_card_without_a_driver_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "class").write_text("0x030200\n")
    (card / "vendor").write_text("0x10de\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "PCI", tmp_path)
    result = gpu.driver(gpu.Gpus(), deadline())
    assert result.status == "fail" and "install the NVIDIA driver" in result.remedy
    (card / "vendor").write_text("0x8086\n")
    assert gpu.driver(gpu.Gpus(), deadline()) == gpu.NO_GPU


def test_nvlink_is_counted_where_there_are_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    two = f"{H100}\n{H100}"
    gpus = fake_smi(tmp_path, monkeypatch, two)
    gpus.get(deadline())
    status = "GPU 0:\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1:\n\t Link 0: 26.562 GB/s"
    fake_smi(tmp_path, monkeypatch, status)
    assert gpu.nvlink(gpus, deadline()) == Result("pass", "2 links of 2 GPUs are active")
    fake_smi(tmp_path, monkeypatch, "GPU 0: no links")
    assert gpu.nvlink(gpus, deadline()).status == "warn"


def test_torch_has_to_see_the_gpu_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = fake_smi(tmp_path, monkeypatch, H100)
    torch_says(monkeypatch, devices=["H100"], computes=True)
    assert compute.torch(gpus, deadline()) == Result("pass", "2.13, CUDA 13.0, sees 1 GPUs")
    torch_says(monkeypatch, cuda="")
    assert "build with CUDA" in compute.torch(gpus, deadline()).remedy
    torch_says(monkeypatch, error="The NVIDIA driver is too old")
    result = compute.torch(gpus, deadline())
    assert result.status == "fail" and "too old" in result.found
    assert result.remedy == "update the NVIDIA driver to one for CUDA 13.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert compute.torch(gpus, deadline()).remedy == "CUDA_VISIBLE_DEVICES is '7'"
    fake_probe(monkeypatch, "TORCH_PROBE", "import torch_that_is_not_there")
    result = compute.torch(gpus, deadline())
    assert result.status == "fail" and "torch_that_is_not_there" in result.found


def test_a_missing_c_compiler_fails_only_where_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reason = "Failed to find C compiler. Please specify via CC"
    fake_probe(monkeypatch, "COMPILER_PROBE", f"raise RuntimeError({reason!r})")
    monkeypatch.setattr(gpu, "PCI", tmp_path)
    nothing = gpu.Gpus()
    monkeypatch.setattr(nothing, "_ask", lambda deadline: [])
    assert compute.triton(nothing, deadline()).status == "pass"
    assert compute.triton(nothing, time.monotonic()).status == "pass", "no answer in time"
    result = compute.triton(fake_smi(tmp_path, monkeypatch, H100), deadline())
    assert result.status == "fail" and "gcc python3-dev" in result.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_probe_of_the_compiler_needs_a_c_compiler():
    command = (*compute.COMPILER_PROBE, "9", "0")
    environment = os.environ | {"CC": "/bin/false"}
    assert output_of(command, deadline(), environment)[0] != 0


def port_of(server: FakeServer, host: str = "127.0.0.1") -> Result:
    return system.port(host, int(server.url.rsplit(":", 1)[1]), deadline())


def test_a_server_that_listens_is_told_from_another_program(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    for host in ("127.0.0.1", "0.0.0.0"):
        assert "taken by a server that runs, version 0" in port_of(fake, host).found
    assert system.port("192.0.2.1", 8000, deadline()).status == "fail"
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: BytesIO(OTHER_SERVER))
    assert port_of(fake).status == "fail"


def test_a_server_that_asks_for_a_key_is_told_from_another_program(tmp_path: Path):
    with fake_server(tmp_path, api_keys=("sk-1",)) as keyed:
        assert "taken by a server that runs" in port_of(keyed).found


def test_a_folder_that_cannot_be_written_fails_and_a_full_one_warns(tmp_path: Path):
    check = partial(system.cache_folder, variable="HF_HOME", deadline=0)
    assert check(tmp_path / "new" / "hub", wanted=0).status == "pass"
    assert not (tmp_path / "new").exists()
    full = check(tmp_path, wanted=1 << 60)
    assert full.status == "warn" and "HF_HOME" in full.remedy
    (tmp_path / "file").touch()
    assert check(tmp_path / "file", wanted=0).status == "fail"


def test_little_memory_fails(tmp_path: Path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 1 kB\nMemAvailable:  1048576 kB\n")
    assert system.memory(0, file) == Result(
        "fail", "1.0 GiB free", "2 GiB are needed beside the model: end other programs"
    )


def test_a_clock_before_the_installation_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(system, "is_synchronized", lambda: True)
    assert system.clock(0).status == "pass"
    monkeypatch.setattr(system, "is_synchronized", lambda: False)
    assert system.clock(0).status == "warn"
    monkeypatch.setattr(system.time, "time", lambda: 0.0)
    result = system.clock(0)
    assert result.status == "fail" and "1970-01-01" in result.found


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--port", "0"), "1 to 65535"), (("--port", "x"), "1 to"), (("--seconds", "0"), "above 0")],
)
def test_wrong_numbers_are_refused(
    words: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *words])
    assert said in capsys.readouterr().err


def test_the_summary_says_whether_a_server_can_run():
    good, odd, bad = Result("pass", ""), Result("warn", ""), Result("fail", "")
    assert doctor.summary({"a": good}) == "a server can run"
    assert doctor.summary({"a": good, "b": odd}) == "a server can run; 1 to look at"
    assert doctor.summary({"a": bad, "b": odd}).startswith("1 failed")
