"""Parts of an answer written without waiting: the same bytes, and a stop without a reader."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx2 as httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.http.connection import BoundedProtocol, outlet

PARTS = [b"x" * length for length in (1, 15, 16, 17, 255, 4096)]
MUCH = 2000  # parts of 64 KB: no socket holds as many
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


class App:
    def __init__(self) -> None:
        self.refused = 0
        self.before_head: bool | None = None
        self.after_end: bool | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = outlet(send)
        assert write is not None
        if scope["path"] == "/before":
            self.before_head = write(b"too early")
        await send(HEAD)
        parts = PARTS if scope["path"] != "/much" else [b"y" * 65_536] * MUCH
        for part in parts:
            if not write(part):
                self.refused += 1
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.after_end = write(b"too late")


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run([listener]))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def test_parts_written_at_once_are_the_body(app: App, port: int) -> None:
    answer = httpx.get(f"http://127.0.0.1:{port}/")
    assert answer.content == b"".join(PARTS)
    assert app.refused == 0 and app.after_end is False


def test_nothing_is_written_before_the_head(app: App, port: int) -> None:
    answer = httpx.get(f"http://127.0.0.1:{port}/before")
    assert answer.content == b"".join(PARTS) and app.before_head is False


def test_a_client_that_does_not_read_is_waited_for(app: App, port: int) -> None:
    with httpx.stream("GET", f"http://127.0.0.1:{port}/much") as answer:
        read = sum(len(part) for part in answer.iter_bytes())
    assert read == MUCH * 65_536
    assert app.refused > 0


async def test_a_send_that_is_not_a_connections_has_no_outlet() -> None:
    async def send(message: object) -> None:
        await asyncio.sleep(0)

    assert outlet(send) is None and outlet(None) is None
