"""Servers behind nginx, HAProxy and Envoy: what a stop or a kill under load loses."""

from __future__ import annotations

import http.client
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import NGINX_POLICIES, run_cell
from benchmarks.server.replica_fleets import Fleet, Replica, envoy, haproxy, nginx
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
CELL = {"num_requests": 120, "num_tokens": 8}
Balancer = Callable[[Path, list[Replica]], AbstractContextManager[Fleet]]


def behind_nginx(policy: str, folder: Path, replicas: list[Replica]):
    return nginx(folder, policy, replicas)


BALANCERS: dict[str, tuple[str, Balancer]] = {
    **{f"nginx, {policy}": ("nginx", partial(behind_nginx, policy)) for policy in NGINX_POLICIES},
    "HAProxy": ("haproxy", haproxy),
    "Envoy": ("envoy", envoy),
}


@pytest.fixture(params=BALANCERS)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    name, made = BALANCERS[request.param]
    request.getfixturevalue(f"{name}_program")
    return made


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_sigterm_loses_no_request(
    balancer: Balancer, replicas: list[Replica], tmp_path: Path, streamed: bool
):
    with balancer(tmp_path, replicas) as fleet:
        outcome, long = run_cell(fleet, signal.SIGTERM, streamed=streamed, **CELL)
    assert outcome.why == [] and outcome.complete == CELL["num_requests"]
    assert long == "", "the stream that was open ends whole"


def test_sigkill_loses_only_streams_that_had_begun(
    balancer: Balancer, replicas: list[Replica], tmp_path: Path
):
    with balancer(tmp_path, replicas) as fleet:
        outcome, _ = run_cell(fleet, signal.SIGKILL, streamed=True, **CELL)
    assert outcome.lost == outcome.begun, outcome.why
    assert outcome.complete + outcome.lost == CELL["num_requests"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nginx", ["-t", "-e", "stderr", "-c", str(DEPLOY / "nginx.conf")]),
        ("haproxy", ["-c", "-f", str(DEPLOY / "haproxy.cfg")]),
        ("envoy", ["--mode", "validate", "-l", "warning", "-c", str(DEPLOY / "envoy.yaml")]),
    ],
)
def test_a_balancer_takes_its_configuration_without_a_warning(
    name: str, words: list[str], request: pytest.FixtureRequest
):
    command = [request.getfixturevalue(f"{name}_program"), *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "warn" not in (ran.stdout + ran.stderr).lower()


@pytest.mark.parametrize(
    ("path", "megabytes", "refused"),
    [("/v1/completions", 31, False), ("/v1/completions", 33, True), ("/v1/files", 100, False)],
)
def test_nginx_takes_bodies_as_large_as_the_servers_do(
    nginx_program: Path,
    replicas: list[Replica],
    tmp_path: Path,
    path: str,
    megabytes: int,
    refused: bool,
):
    with nginx(tmp_path, "least_conn", replicas) as fleet:
        connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
        connection.putrequest("POST", path)
        connection.putheader("content-length", str(megabytes << 20))
        connection.putheader("expect", "100-continue")
        connection.endheaders()
        # Before nginx asks for the body it has compared the length.
        line = connection.sock.makefile("rb").readline()
        connection.close()
    assert (b" 413 " in line) == refused and (b" 100 " in line) != refused, line
