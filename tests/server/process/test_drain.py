"""SIGTERM and SIGINT: what is still served, when the port is closed, what ends how."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from unittest import mock

import httpx2 as httpx
import pytest

from runtime.config import EngineConfig
from server.config import ServerConfig
from server.http.connection_limit import ConnectionLimit
from server.http.middleware import DrainState
from server.process.drain import drain
from tests.support.server.launched_server import (
    REQUEST,
    STUB_ENGINE,
    LaunchedServer,
    LineStream,
    Start,
    alive,
    assert_all_end,
    serving,
)


def test_the_port_is_closed_while_an_open_stream_ends_whole(start: Start):
    launched = serving(start)
    with httpx.Client(base_url=launched.url) as kept:
        assert kept.get("/livez").status_code == 200
        stream = LineStream(launched)
        launched.process.send_signal(signal.SIGTERM)
        launched.wait_until(lambda: not launched.connects())
        served = kept.post("/v1/completions", json={**REQUEST, "max_tokens": 3})
    assert served.status_code == 200, "a connection that was open is still served"
    assert served.headers["connection"] == "close"
    assert stream.is_alive()
    launched.child(STUB_ENGINE).send_signal(signal.SIGUSR1)
    lines = stream.ended()
    assert lines[-1] == "data: [DONE]" and not stream.broken
    assert not any('"error"' in line for line in lines)
    assert launched.process.wait(20) == 0


def test_in_the_drain_delay_readyz_is_503_and_requests_are_served(start: Start):
    launched = serving(start, drain_delay=6, api_workers=2)
    stream = LineStream(launched)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait_until(lambda: all(launched.status("/readyz") == 503 for _ in range(8)), 5)
    served = httpx.post(f"{launched.url}/v1/completions", json={**REQUEST, "max_tokens": 3})
    assert served.json()["usage"]["completion_tokens"] == 3
    assert served.headers["connection"] == "close"
    assert launched.get("/readyz").json()["error"]["code"] == "draining"
    assert launched.status("/livez") == 200
    launched.wait_until(lambda: not launched.connects())
    assert stream.is_alive()
    launched.child(STUB_ENGINE).send_signal(signal.SIGUSR1)
    assert stream.ended()[-1] == "data: [DONE]" and not stream.broken
    assert launched.process.wait(20) == 0


def test_no_request_is_lost_while_the_port_is_closed(start: Start):
    launched = serving(start, api_workers=2)
    outcomes: list[int | str] = []

    def call() -> None:
        while "refused" not in outcomes:
            try:
                url = f"{launched.url}/v1/completions"
                answer = httpx.post(url, json={**REQUEST, "max_tokens": 2}, timeout=20)
                outcomes.append(answer.status_code)
            except httpx.ConnectError:
                outcomes.append("refused")
            except httpx.TransportError as error:
                outcomes.append(repr(error))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    launched.wait_until(lambda: len(outcomes) > 40)
    launched.process.send_signal(signal.SIGTERM)
    for caller in callers:
        caller.join()
    assert set(outcomes) == {200, "refused"}
    assert launched.process.wait(20) == 0


def test_a_request_on_its_way_on_a_new_connection_is_served(start: Start):
    launched = serving(start)
    port = int(launched.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        launched.wait_until(lambda: launched.status() == 200)  # so the one before is accepted
        launched.process.send_signal(signal.SIGTERM)
        launched.wait_until(lambda: not launched.connects())
        time.sleep(0.2)
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    assert launched.process.wait(20) == 0


def test_a_stream_longer_than_the_drain_ends_with_an_error_event(start: Start):
    launched = serving(start, drain_seconds=0.5)
    stream = LineStream(launched)
    launched.process.send_signal(signal.SIGINT)
    lines = stream.ended()
    assert lines[-1] == "data: [DONE]" and not stream.broken
    assert "the server is shutting down" in lines[-2]
    assert launched.process.wait(20) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**REQUEST, "max_tokens": 2000}),
        ("/v1/embeddings", {"model": "tiny-chat", "input": ["once", "upon"]}),
    ],
)
def test_an_answer_in_one_piece_that_the_drain_cuts_off_is_503(
    start: Start, path: str, body: dict[str, object]
):
    launched = serving(start, mode="mute", drain_seconds=0.5)
    with ThreadPoolExecutor(1) as pool:
        post = partial(httpx.post, launched.url + path, json=body, timeout=30)
        answer = pool.submit(post)
        launched.wait_until(lambda: runs(launched))
        launched.process.send_signal(signal.SIGTERM)
        refused = answer.result(20)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) > 0 and "another one" in refused.text
    assert launched.process.wait(20) == 0


def runs(launched: LaunchedServer) -> bool:
    """Whether the engine has a request."""
    lines = launched.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("wavefill_requests_running{")]
    return any(not line.endswith(" 0.0") for line in found)


@dataclass(eq=False)
class SlowCaller:
    """A connection whose answer is complete, and not yet read."""

    reads: bool = False

    def has_unsent_bytes(self) -> bool:
        return not self.reads

    def cut(self) -> None:
        raise AssertionError


async def test_an_answer_that_is_still_read_has_the_seconds_of_the_drain():
    limit, caller = ConnectionLimit(), SlowCaller()
    limit.opened(caller)
    limit.request_begun(caller)
    limit.request_ended(caller)
    server = mock.Mock(limit=limit, servers=[], should_exit=False)
    server.server_state.connections = set()
    state = mock.Mock(config=ServerConfig(engine=EngineConfig(model=""), drain_seconds=60))
    state.client.down = state.client.ready = None
    with socket.socket() as listener:
        ending = asyncio.create_task(drain(server, listener, DrainState(), state, mock.Mock()))
        await asyncio.sleep(0.3)
        assert not server.should_exit
        caller.reads = True
        await asyncio.wait_for(ending, 20)
    assert server.should_exit


def test_an_engine_that_dies_in_the_drain_ends_it(start: Start):
    launched = serving(start, drain_seconds=60)
    stream = LineStream(launched)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait_until(lambda: not launched.connects())
    launched.child(STUB_ENGINE).kill()
    assert launched.process.wait(20) == 0
    lines = stream.ended()
    assert lines[-1] == "data: [DONE]" and not stream.broken
    assert "SIGKILL" in lines[-2]


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_a_second_signal_ends_everything_at_once(start: Start, delay: float):
    launched = serving(start, drain_delay=delay, drain_seconds=60)
    stream, family = LineStream(launched), launched.children()
    launched.process.send_signal(signal.SIGINT)
    launched.wait_until(lambda: launched.status() == (503 if delay else 0))
    launched.process.send_signal(signal.SIGINT)
    launched.process.wait(20)
    stream.ended()
    assert_all_end(family, 10)
    assert "did not end" not in launched.log.read_text()


def test_a_second_signal_ends_an_engine_that_ignores_signals(start: Start):
    launched = serving(start)
    family, api = launched.children(), launched.child("server.process.api_process")
    launched.child(STUB_ENGINE).suspend()
    launched.process.send_signal(signal.SIGTERM)
    launched.wait_until(lambda: not alive(api))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(20) == 0
    assert_all_end(family, 10)
    assert "did not end" not in launched.log.read_text()
