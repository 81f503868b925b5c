"""Two servers behind smg: affinity of prefixes, what it reads, and what a stop or a kill loses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import run_cell
from benchmarks.server.replica_fleets import SMG_OPTIONS, Fleet, Replica, get, smg, smg_command
from tests.support.paths import ROOT

CELL = {"num_requests": 120, "num_tokens": 8}
DOCUMENT = ROOT / "docs" / "replicas.md"


@pytest.fixture(scope="module")
def fleet(
    smg_program: None, replicas: list[Replica], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with smg(tmp_path_factory.mktemp("smg"), replicas, "--load-monitor-interval", "1") as fleet:
        yield fleet


def cached_tokens(port: int, prompt: str) -> int:
    body = {"model": "tiny-chat", "prompt": prompt, "max_tokens": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_tokens(replica: Replica) -> int:
    return json.loads(get(replica.port, "/server_info")[1])["stats"]["prompt_tokens"]


def test_requests_with_one_prefix_go_to_the_server_that_has_it_cached(
    fleet: Fleet, replicas: list[Replica]
):
    before = [prompt_tokens(replica) for replica in replicas]
    for letter in "ABCDEF":
        prompt = f"{letter} {'and so it went on and on ' * 20}"
        hits = [cached_tokens(fleet.port, f"{prompt}{number}") for number in range(6)]
        assert min(hits[1:]) > 64, f"each one after the first: {hits}"
    after = [prompt_tokens(replica) for replica in replicas]
    assert sum(after) > sum(before)


def test_smg_reads_the_capacity_of_the_kv_of_each_server(fleet: Fleet, replicas: list[Replica]):
    capacity = json.loads(get(replicas[0].port, "/server_info")[1])["max_total_num_tokens"]
    deadline = time.monotonic() + 30
    while True:
        loads = json.loads(get(fleet.port, "/get_loads")[1])["loads"]
        found = {load["worker"]: load["max_total_num_tokens"] for load in loads}
        if len(found) == 2:
            break
        assert time.monotonic() < deadline, loads
        time.sleep(0.2)
    assert capacity > 0 and set(found.values()) == {capacity}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_behind_smg_sigterm_loses_no_request(fleet: Fleet, streamed: bool):
    outcome, long = run_cell(fleet, signal.SIGTERM, streamed=streamed, **CELL)
    assert outcome.why == [] and outcome.complete == CELL["num_requests"]
    assert long == "", "the stream that was open ends whole"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_behind_smg_sigkill_loses_only_streams_that_had_begun(fleet: Fleet, streamed: bool):
    outcome, _ = run_cell(fleet, signal.SIGKILL, streamed=streamed, **CELL)
    assert outcome.lost == (outcome.begun if streamed else 0), outcome.why
    assert outcome.complete + outcome.lost == CELL["num_requests"]


def test_smg_knows_the_options_of_the_command_in_the_documentation(smg_program: None):
    (command,) = re.findall(r"^smg launch .*?[^\\]\n", DOCUMENT.read_text(), re.M | re.S)
    words = command.replace("\\\n", " ").split()
    assert [word for word in SMG_OPTIONS if word not in words] == [], "the tests use others"
    ran = subprocess.run([smg_command(), "launch", "--help"], capture_output=True, text=True)
    known = set(re.findall(r"--[\w-]+", ran.stdout))
    assert {word for word in words if word.startswith("--")} <= known


def test_the_documentation_says_how_the_gateway_is_installed():
    text = DOCUMENT.read_text()
    assert "pip install smg" in text and "ray_serve:app" in text
    assert Path(ROOT / "deploy" / "ray_serve.py").exists()
