"""What the NVIDIA driver says, by nvidia-smi: GPUs, their memory, clocks and NVLink."""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from server.cli.doctor.check import Result, output_of

FIELDS = (
    *("name", "driver_version", "compute_cap", "memory.total", "memory.free"),
    *("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown"),
)
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor; class of graphics cards and accelerators
MIN_CAPABILITY = (8, 0)  # of our attention kernels
MIN_FREE_SHARE = 0.5
NO_GPU = Result("pass", "no NVIDIA GPU: models run on the CPU")


@dataclass(frozen=True)
class Gpu:
    """Sizes in MiB."""

    name: str
    driver: str
    capability: tuple[int, int]
    total: int
    free: int
    slowed: bool  # by heat or by its power supply


class Gpus:
    """Asks nvidia-smi once, for all checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[Gpu] | None = None
        self.error = ""  # of nvidia-smi

    def get(self, deadline: float) -> list[Gpu]:
        with self._lock:
            if self._found is None:
                self._found = self._ask(deadline)
            return self._found

    def _ask(self, deadline: float) -> list[Gpu]:
        query = f"--query-gpu={','.join(FIELDS)}"
        try:
            code, out, err = output_of(
                ("nvidia-smi", query, "--format=csv,noheader,nounits"), deadline
            )
        except FileNotFoundError:
            return []
        if code:
            self.error = " ".join((out + err).split())[:200] or f"exit code {code}"
            return []
        return [read_gpu(line) for line in out.splitlines() if line.strip()]


def read_gpu(line: str) -> Gpu:
    """A line of the query; what a GPU does not have is [N/A]."""
    words = [word.strip() for word in line.split(",")]
    major, _, minor = words[2].partition(".")
    total, free = (int(float(word)) if word[:1].isdigit() else 0 for word in words[3:5])
    slowed = "Active" in words[5:7]
    return Gpu(words[0], words[1], (int(major), int(minor or 0)), total, free, slowed)


def has_card() -> bool:
    """Whether the bus has an NVIDIA GPU, with a driver or without."""
    try:
        for device in PCI.iterdir():
            kind = (device / "class").read_text()
            if kind.startswith(DISPLAY) and (device / "vendor").read_text().strip() == NVIDIA:
                return True
    except OSError:
        pass
    return False


def driver(gpus: Gpus, deadline: float) -> Result:
    found = gpus.get(deadline)
    if gpus.error:
        return Result(
            "fail",
            f"nvidia-smi: {gpus.error}",
            "load or reinstall the NVIDIA driver; after an update of the driver, restart",
        )
    if not found:
        if has_card():
            return Result(
                "fail",
                "an NVIDIA GPU is here, and nvidia-smi is not",
                "install the NVIDIA driver, in a container start it with --gpus all",
            )
        return NO_GPU
    names = ", ".join(sorted({gpu.name for gpu in found}))
    text = f"{found[0].driver}: {len(found)} x {names}"
    if old := [gpu for gpu in found if gpu.capability < MIN_CAPABILITY]:
        capability = ".".join(map(str, old[0].capability))
        return Result(
            "warn",
            f"{text}; compute capability {capability} of {old[0].name} is below 8.0",
            "the fast attention kernels need 8.0 (Ampere): choose another GPU by "
            "CUDA_VISIBLE_DEVICES",
        )
    return Result("pass", text)


def memory(gpus: Gpus, deadline: float) -> Result:
    found = gpus.get(deadline)
    if not found:
        return NO_GPU
    text = ", ".join(f"{gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free" for gpu in found)
    if any(gpu.free < MIN_FREE_SHARE * gpu.total for gpu in found):
        return Result(
            "warn",
            text,
            "other programs hold it: nvidia-smi lists them; end them, or choose another GPU by "
            "CUDA_VISIBLE_DEVICES",
        )
    return Result("pass", text)


def gpu_clock(gpus: Gpus, deadline: float) -> Result:
    found = gpus.get(deadline)
    if not found:
        return NO_GPU
    slowed = [str(index) for index, gpu in enumerate(found) if gpu.slowed]
    if slowed:
        return Result(
            "warn",
            f"GPU {', '.join(slowed)} is slowed down by heat or by its power supply",
            "nvidia-smi -q -d PERFORMANCE says which: check cooling and power",
        )
    return Result("pass", "no GPU is slowed down by heat or power")


def nvlink(gpus: Gpus, deadline: float) -> Result:
    found = gpus.get(deadline)
    if len(found) < 2:
        return Result("pass", "not needed with one GPU") if found else NO_GPU
    try:
        _, out, _ = output_of(("nvidia-smi", "nvlink", "--status"), deadline)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        out = ""
    links = len(re.findall(r"Link \d+:\s*[\d.]+ GB/s", out))
    if not links:
        return Result(
            "warn",
            f"{len(found)} GPUs without active NVLink: they exchange data over PCIe",
            "nothing to do for a server on one GPU; else see `nvidia-smi nvlink --status`",
        )
    return Result("pass", f"{links} links of {len(found)} GPUs are active")
