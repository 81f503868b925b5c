"""The dashboard of a server with several API processes: each shows what all of them do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.server_process import Server, start_server, stop_server

SECONDS = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = start_server(tmp_path / "log", "tiny-chat", "--api-workers", "2")
    yield server
    stop_server(server)


def worker_of(server: Server, request_id: str, client: httpx.Client) -> bool:
    """Whether the process at the other end of this connection answered a request."""
    return client.get(f"{server.url}/v1/requests/{request_id}").status_code == 200


def ask(server: Server, client: httpx.Client, id: str, **fields: Any) -> None:
    body = {"model": "tiny-chat", "prompt": "Once", "max_tokens": 3, **fields}
    headers = {"x-request-id": id}
    assert client.post(f"{server.url}/v1/completions", json=body, headers=headers).is_success


def connections_to_both(server: Server) -> list[httpx.Client]:
    """A kept connection to each API process."""
    first = httpx.Client(timeout=SECONDS)
    ask(server, first, "first")
    for _ in range(60):
        second = httpx.Client(timeout=SECONDS)
        if not worker_of(server, "first", second):
            ask(server, second, "second")
            return [first, second]
        second.close()
    raise AssertionError("one API process takes all connections")


def test_a_page_shows_the_requests_of_all_api_processes(server: Server) -> None:
    clients = connections_to_both(server)
    body = {"model": "tiny-chat", "prompt": "Once", "max_tokens": 1500, "stream": True}
    long = clients[1].stream(
        "POST", f"{server.url}/v1/completions", json=body | {"ignore_eos": True}
    )
    with closing(clients[0]), closing(clients[1]), long as answer:
        chunks = answer.iter_raw()  # closes the stream when it is collected
        next(chunks)
        with clients[0].stream("GET", f"{server.url}/dashboard/events") as page:
            deadline = time.monotonic() + SECONDS
            for line in page.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"engine": None}
                if event["engine"] and event["open"] == 1:
                    break
                assert time.monotonic() < deadline, event
        states = sorted(row["state"] for row in event["requests"])
        assert states == ["finished", "finished", "running"]
        assert event["keys"][""]["requests"] == 2
        [live] = [row for row in event["requests"] if row["state"] == "running"]
        assert live["sequence"] in {one["id"] for one in event["engine"]["sequences"]}


def test_an_open_page_does_not_hold_up_a_stop(server: Server) -> None:
    with httpx.stream("GET", f"{server.url}/dashboard/events", timeout=SECONDS) as page:
        lines = page.iter_lines()
        next(lines)
        server.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(SECONDS) == 0
