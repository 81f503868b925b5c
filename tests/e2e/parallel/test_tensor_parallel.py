"""A server whose model two processes share: the same answers, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.support.server.server_process import Server, free_port, start_server, stop_server

Start = Callable[..., Server]
SHARED = ("--dtype", "float32", "--tensor-parallel", "2")
ENDLESS = {"model": "tiny-chat", "prompt": "once upon", "max_tokens": 1500, "ignore_eos": True}
CHAT = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello! What can you do?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("shared") / "log", *SHARED)
    yield server
    stop_server(server)


def rank_1(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "runtime.engine.rank_process" in child.cmdline())


def chat(server: Server, **fields: object) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def answers(server: Server) -> list[str]:
    return [
        chat(server, temperature=0, max_tokens=40),
        chat(server, temperature=1.0, seed=11, max_tokens=40),
        chat(server, temperature=0, max_tokens=60, response_format=FORMAT),
    ]


@pytest.mark.slow
def test_answers_are_those_of_a_server_with_one_process(shared: Server, own_server: Start):
    alone = own_server("--dtype", "float32")
    assert answers(shared) == answers(alone)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_begun_answers_and_all_ranks_start_again(shared: Server):
    before = answers(shared)
    with httpx.stream(
        "POST", f"{shared.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(rank_1(shared).pid, signal.SIGKILL)
        rest = list(lines)
    assert any("error" in line for line in rest), rest[-3:]
    shared.wait_until(lambda: not shared.ready())
    shared.wait_until(shared.ready, 60)
    assert answers(shared) == before
    assert "rank 1 of 2 ended with signal 9" in shared.log.read_text()


@pytest.mark.slow
def test_ranks_end_with_the_server(own_server: Start):
    server = own_server(*SHARED)
    rank = rank_1(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not rank.is_running() or rank.wait(10) is not None
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_and_all_ranks_start_again(own_server: Start):
    server = own_server(*SHARED)
    rank = rank_1(server)
    rank.suspend()
    try:
        assert chat(server, max_tokens=3)  # by the next engine
    finally:
        if rank.is_running():
            rank.kill()
    assert "a rank hangs or cannot be reached" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_a_size_that_does_not_divide_the_model_is_refused_in_one_line():
    command = [Path(sys.executable).parent / "wavefill", "serve", "--device", "cpu"]
    ran = subprocess.run(
        [*command, "--port", str(free_port()), "-tp", "3"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 2
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error:")]
    assert errors == [
        "error: --tensor-parallel 3: 3 does not divide the 4 attention heads of this qwen3_vl "
        "model: sizes that divide it: 2, 4"
    ]
