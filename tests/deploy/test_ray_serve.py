"""deploy/ray_serve.py on a Ray cluster of a head and two nodes, all in this machine."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from benchmarks.server.bench_replicas import DRAIN_SECONDS, run_cell
from benchmarks.server.ray_fleet import RayFleet, ray_cluster
from tests.support.paths import ROOT

CELL = {"num_requests": 60, "num_tokens": 8}
# Starts of a cluster and of its servers, on two cores that do other things too.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def fleet(ray_package: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), drain_seconds=DRAIN_SECONDS) as fleet:
        yield fleet


@contextmanager
def sent(fleet: RayFleet, **body: Any) -> Iterator[http.client.HTTPResponse]:
    """The answer to a completion; the connection is closed when the block ends."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
    fields = {"model": "tiny-chat", "max_tokens": 1, **body}
    headers = {"content-type": "application/json", "x-request-id": "from-the-caller"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(fields), headers)
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def cached_tokens(fleet: RayFleet, prompt: str) -> int:
    with sent(fleet, prompt=prompt) as answer:
        return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_with_one_prefix_go_to_the_server_that_has_it_cached(fleet: RayFleet):
    for letter in "ABCDEF":
        prompt = f"{letter} {'and so it went on and on ' * 40}"
        hits = [cached_tokens(fleet, f"{prompt}{number}") for number in range(6)]
        assert min(hits[1:]) > 64, f"each one after the first: {hits}"


def test_status_headers_and_errors_of_the_server_are_passed_on(fleet: RayFleet):
    with sent(fleet, prompt="a", max_tokens=-1) as answer:
        assert answer.status == 400
        assert answer.getheader("x-request-id") == "from-the-caller"
        assert json.load(answer)["error"]["param"] == "max_tokens"


def test_tokens_of_a_stream_are_passed_on_as_they_come(fleet: RayFleet):
    fields = {"prompt": "once upon", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with sent(fleet, **fields) as answer:
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        pieces = list(iter(lambda: answer.read1(65536), b""))
    assert len(pieces) > 10, "200 tokens in one piece would have been collected"
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_a_caller_that_leaves_ends_the_request_in_the_server(fleet: RayFleet):
    fields = {"prompt": "once upon", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with sent(fleet, **fields) as answer:
        answer.read1(100)
        ports = fleet.command("servers")
        assert sum(fleet.running(port) for port in ports) == 1
    deadline = time.monotonic() + 20
    while any(fleet.running(port) for port in ports):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_node_that_is_drained_loses_no_request(fleet: RayFleet, streamed: bool):
    outcome, long = run_cell(fleet, signal.SIGTERM, streamed=streamed, **CELL)
    assert outcome.why == [] and outcome.complete == CELL["num_requests"]
    assert long == "", "the stream that was open ends whole"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_node_that_is_killed_loses_only_streams_that_had_begun(fleet: RayFleet, streamed: bool):
    outcome, _ = run_cell(fleet, signal.SIGKILL, streamed=streamed, **CELL)
    assert outcome.lost == (outcome.begun if streamed else 0), outcome.why
    assert outcome.complete + outcome.lost == CELL["num_requests"]


def test_a_replica_is_taken_away_without_load_and_added_under_load(fleet: RayFleet):
    assert len(fleet.command("servers")) == 2
    fleet.command("scale 1 2")
    deadline = time.monotonic() + 300
    while len(fleet.command("servers")) != 1:
        assert time.monotonic() < deadline, "no replica is taken away without load"
        time.sleep(1)
    fields = {"max_tokens": 1900, "stream": True, "ignore_eos": True}
    with ExitStack() as stack:
        for number in range(12):
            stack.enter_context(sent(fleet, prompt=str(number), **fields))
        while len(fleet.command("servers")) != 2:
            assert time.monotonic() < deadline, "no replica is added under load"
            time.sleep(0.5)


def test_a_wrong_option_is_refused_by_name(ray_package: None):
    code = "import ray_serve; ray_serve.Options(modell='x')"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "deploy", capture_output=True, text=True
    )
    assert ran.returncode == 1 and "modell" in ran.stderr
