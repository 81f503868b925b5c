"""The server's processes, as every Prometheus client exports its own, and what was built.

A server is several processes: the label `process` says which, and those of one kind count together.
Of files, each process has a limit of its own: open ones and limit are those of the fullest.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client.metrics_core import Metric

PROC = Path("/proc")
# Module of a process -> its label.
KINDS = {
    "server.process.api_process": "api",
    "server.cli.hub_download": "download",
    "runtime.engine.process": "engine",
    "runtime.engine.rank_process": "rank",
    "runtime.precompile.worker": "compiler",
    "runtime.grammar.worker": "grammar",
    "server.constrained.grammar_worker": "grammar",
    "server.images.decode_worker": "image",
}
LAUNCHER = "launcher"
HELP = {
    "process_cpu_seconds": ("counter", "User and system CPU time, in seconds."),
    "process_resident_memory_bytes": ("gauge", "Resident memory size in bytes."),
    "process_virtual_memory_bytes": ("gauge", "Virtual memory size in bytes."),
    "process_open_fds": ("gauge", "Open file descriptors, of the fullest process."),
    "process_max_fds": ("gauge", "Limit of open file descriptors, of that process."),
    "process_threads": ("gauge", "Threads."),
    "process_start_time_seconds": ("gauge", "Start, of the oldest one, in Unix time."),
}


OPEN, LIMIT = "process_open_fds", "process_max_fds"


@dataclass(frozen=True)
class Usage:
    """Of one process, by the names of HELP."""

    kind: str
    values: Mapping[str, float]


def process_families(labels: Mapping[str, str], server_pid: int) -> Iterator[Metric]:
    """None of processes where there is no /proc.

    server_pid  of the launcher; 0: this process is the whole server
    """
    yield _build_info(labels)
    found = [usage for usage in _usages(server_pid) if usage is not None]
    kinds = sorted({usage.kind for usage in found})
    for name, (type_, text) in HELP.items():
        family = Metric(name, text, type_)
        sample = f"{name}_total" if type_ == "counter" else name
        for kind in kinds:
            own = [usage.values for usage in found if usage.kind == kind]
            if name in (OPEN, LIMIT):
                own = [max(own, key=lambda values: values[OPEN] / values[LIMIT])]
            whole = min if name == "process_start_time_seconds" else sum
            value = whole(values[name] for values in own)
            family.add_sample(sample, {**labels, "process": kind}, value)
        if kinds:
            yield family


def _build_info(labels: Mapping[str, str]) -> Metric:
    name = "wavefill_build_info"
    family = Metric(name, "Versions of what runs.", "gauge")
    versions = {
        "version": _version("wavefill"),
        "python_version": platform.python_version(),
        "torch_version": _version("torch"),
    }
    family.add_sample(name, {**labels, **versions}, 1.0)
    return family


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _usages(server_pid: int) -> Iterator[Usage | None]:
    if not server_pid:
        yield _usage(os.getpid(), "api")
        return
    yield _usage(server_pid, LAUNCHER)
    children = _children(server_pid)
    if children is None:
        yield _usage(os.getpid(), "api")
        return
    while children:
        child = children.pop()
        kind = _kind(child)
        if kind is not None:
            yield _usage(child, kind)
            children += _children(child) or ()


def _children(pid: int) -> list[int] | None:
    """Of all its threads; None if that is not known."""
    found, known = list[int](), False
    for file in (PROC / str(pid)).glob("task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += map(int, file.read_text().split())
            known = True
    return found if known else None


def _kind(pid: int) -> str | None:
    try:
        words = (PROC / f"{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((kind for module, kind in KINDS.items() if module in words), None)


def _usage(pid: int, kind: str) -> Usage | None:
    """None if it has ended meanwhile."""
    folder = PROC / str(pid)
    try:
        # The second field is the name in brackets, which may hold blanks.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        boot = _boot_time()
        ticks = os.sysconf("SC_CLK_TCK")
        limits = (folder / "limits").read_text().splitlines()
        limit = next(line for line in limits if line.startswith("Max open files")).split()[3]
        values = {
            "process_cpu_seconds": (int(fields[11]) + int(fields[12])) / ticks,
            "process_resident_memory_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            "process_virtual_memory_bytes": int(fields[20]),
            OPEN: len(os.listdir(folder / "fd")),
            LIMIT: float("inf") if limit == "unlimited" else int(limit),
            "process_threads": int(fields[17]),
            "process_start_time_seconds": boot + int(fields[19]) / ticks,
        }
    except OSError:
        return None
    return Usage(kind, values)


@cache
def _boot_time() -> float:
    """Unix time."""
    lines = (PROC / "stat").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("btime"))
