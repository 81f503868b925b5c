"""The processes of a server in /metrics: also those that its processes have started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from server.metrics import process_families as process_families_module
from server.metrics.process_families import Usage, process_families

# Starts the first of $BELOW, which starts the next one, and ends with its stdin.
CODE = """
import os, subprocess, sys
below = os.environ["BELOW"].split()
if below:
    environment = {**os.environ, "BELOW": " ".join(below[1:])}
    subprocess.Popen([sys.executable, __file__, below[0]], env=environment)
else:
    print(flush=True)
sys.stdin.read()
"""


@contextmanager
def chain(folder: Path, *modules: str) -> Iterator[psutil.Process]:
    """A process, its child with the first of these words as argument, the child of that, ..."""
    script = folder / "script.py"
    script.write_text(CODE)
    with subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "BELOW": " ".join(modules)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdout.readline()  # the last one runs
            yield psutil.Process(process.pid)
        finally:
            process.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("modules", "kinds"),
    [
        (("runtime.engine.process", "runtime.engine.rank_process"), ["engine", "rank"]),
        (("server.process.api_process", "server.images.decode_worker"), ["api", "image"]),
        (("runtime.engine.process", "another.program"), ["engine"]),
    ],
)
def test_processes_that_a_servers_processes_started_are_counted(
    tmp_path: Path, modules: tuple[str, ...], kinds: list[str]
):
    with chain(tmp_path, *modules) as launcher:
        families = {f.name: f for f in process_families({}, launcher.pid)}
        found = {
            sample.labels["process"]: sample.value
            for sample in families["process_resident_memory_bytes"].samples
        }
        assert sorted(found) == sorted(["launcher", *kinds])
        below = launcher.children(recursive=True)[: len(kinds)]
        resident = sum(each.memory_info().rss for each in (launcher, *below))
        assert sum(found.values()) == pytest.approx(resident, rel=0.2)


def test_open_files_are_those_of_the_fullest_process_of_a_kind(monkeypatch: pytest.MonkeyPatch):
    """A sum over processes, against the limit of one, would be full when each is half empty."""
    rest = dict.fromkeys(process_families_module.HELP, 1.0)
    usages = [
        Usage("api", rest | {"process_open_fds": opened, "process_max_fds": limit})
        for opened, limit in ((60.0, 100.0), (80.0, 100.0), (90.0, 1000.0))
    ]
    monkeypatch.setattr(process_families_module, "_usages", lambda pid: iter(usages))
    values = {f.name: f.samples[0].value for f in process_families({}, 1)}
    assert (values["process_open_fds"], values["process_max_fds"]) == (80, 100)
    assert values["process_threads"] == 3
