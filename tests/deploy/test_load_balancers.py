"""Servers behind nginx: what is lost when one is stopped or killed under load."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import NGINX_POLICIES, run_cell
from benchmarks.server.replica_fleets import Replica, nginx
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "replicas.md"
CELL = {"num_requests": 120, "num_tokens": 8}


@pytest.mark.parametrize("policy", NGINX_POLICIES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_behind_nginx_sigterm_loses_no_request(
    nginx_program: str, replicas: list[Replica], tmp_path: Path, policy: str, streamed: bool
):
    with nginx(tmp_path, policy, replicas) as fleet:
        outcome, long = run_cell(fleet, signal.SIGTERM, streamed=streamed, **CELL)
    assert outcome.why == [] and outcome.complete == CELL["num_requests"]
    assert long == "", "the stream that was open ends whole"


@pytest.mark.parametrize("policy", NGINX_POLICIES)
def test_behind_nginx_sigkill_loses_only_streams_that_had_begun(
    nginx_program: str, replicas: list[Replica], tmp_path: Path, policy: str
):
    with nginx(tmp_path, policy, replicas) as fleet:
        outcome, _ = run_cell(fleet, signal.SIGKILL, streamed=True, **CELL)
    assert outcome.lost == outcome.begun, outcome.why
    assert outcome.complete + outcome.lost == CELL["num_requests"]


def test_haproxy_takes_the_lines_of_the_documentation(haproxy_program: str, tmp_path: Path):
    (lines,) = re.findall(r"^```haproxy\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    file = tmp_path / "haproxy.cfg"
    file.write_text(lines)
    ran = subprocess.run([haproxy_program, "-c", "-f", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WARNING" not in ran.stdout + ran.stderr
