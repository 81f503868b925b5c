"""A client that does not read its answer is cut off, one that reads slowly is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.http import unread
from server.http.connection import BoundedProtocol
from server.http.unread import UnreadAnswers

MUCH = 64 << 20  # no socket holds as much
HEADERS = [(b"content-length", str(MUCH).encode())]


class Server:
    """Answers with MUCH, in parts or at once."""

    def __init__(self) -> None:
        self.cut = threading.Event()
        self.gone = threading.Event()  # the application was told
        protocol: Any = partial(BoundedProtocol, unread=UnreadAnswers(self.cut.set))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                http=protocol,
                log_config=None,
                lifespan="off",
                ws="none",
            )
        )
        self._thread = threading.Thread(target=lambda: self._server.run([self.listener]))
        self._thread.start()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = MUCH if scope["path"] == "/whole" else 1 << 20
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for sent in range(size, MUCH + 1, size):
            part = {"type": "http.response.body", "body": bytes(size), "more_body": sent < MUCH}
            await send(part)
        if (await receive())["type"] == "http.disconnect":
            self.gone.set()

    def ask(self, path: bytes) -> socket.socket:
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        caller.settimeout(20)
        caller.connect(self.listener.getsockname())
        caller.sendall(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
        return caller

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.listener.close()
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("path", [b"/whole", b"/parts"])
def test_who_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, server: Server, path: bytes
) -> None:
    monkeypatch.setattr(unread, "UNREAD_SECONDS", 0.3)
    with server.ask(path):
        assert server.cut.wait(20) and server.gone.wait(20)


def test_who_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(unread, "UNREAD_SECONDS", 1.0)
    read = 0
    with server.ask(b"/whole") as caller:
        for _ in range(8):  # twice as long as a client may pause
            time.sleep(0.25)
            read += len(caller.recv(1 << 20))
        while read < MUCH:
            part = caller.recv(1 << 20)
            assert part, "the connection was cut"
            read += len(part)
    assert not server.cut.is_set()


class Waiting:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.is_cut = num_bytes, False

    def unread_bytes(self) -> int:
        return self.num_bytes

    def cut(self) -> None:
        self.is_cut = True


async def test_of_too_many_unread_bytes_the_largest_answer_goes() -> None:
    cut: list[int] = []
    answers = UnreadAnswers(lambda: cut.append(1))
    limit = unread.MAX_UNREAD_BYTES
    small, large, last = Waiting(limit // 4), Waiting(limit // 2), Waiting(limit // 2)
    answers.paused(small)
    answers.paused(large)
    assert not cut
    answers.paused(last)
    assert large.is_cut and not small.is_cut and not last.is_cut and cut == [1]
    answers.resumed(small)
    large = Waiting(limit // 2)
    answers.paused(large)
    assert not large.is_cut
    await asyncio.sleep(0)
