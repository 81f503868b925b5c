"""Two servers behind nginx: what is lost when one of them is stopped or killed under load."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import POLICIES, Replica, free_ports, nginx, run_cell
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "replicas.md"
CELL = {"num_requests": 120, "num_tokens": 8}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    folder = tmp_path_factory.mktemp("replicas")
    replicas = [Replica(port, folder / f"{port}.log", ()) for port in free_ports(2)]
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_behind_nginx_sigterm_loses_no_request(
    nginx_program: str, replicas: list[Replica], tmp_path: Path, policy: str, streamed: bool
):
    (port,) = free_ports(1)
    with nginx(tmp_path, policy, port, replicas):
        outcome, long = run_cell(port, replicas[0], signal.SIGTERM, streamed=streamed, **CELL)
    replicas[0].start()
    assert outcome.why == [] and outcome.complete == CELL["num_requests"]
    assert long == "", "the stream that was open ends whole"


@pytest.mark.parametrize("policy", POLICIES)
def test_behind_nginx_sigkill_loses_only_streams_that_had_begun(
    nginx_program: str, replicas: list[Replica], tmp_path: Path, policy: str
):
    (port,) = free_ports(1)
    with nginx(tmp_path, policy, port, replicas):
        outcome, _ = run_cell(port, replicas[0], signal.SIGKILL, streamed=True, **CELL)
    replicas[0].start()
    assert outcome.lost == outcome.begun, outcome.why
    assert outcome.complete + outcome.lost == CELL["num_requests"]


def test_haproxy_takes_the_lines_of_the_documentation(haproxy_program: str, tmp_path: Path):
    (lines,) = re.findall(r"^```haproxy\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    file = tmp_path / "haproxy.cfg"
    file.write_text(lines)
    ran = subprocess.run([haproxy_program, "-c", "-f", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WARNING" not in ran.stdout + ran.stderr
