"""What a connection may send before its request is admitted, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from server.http.connection import BoundedProtocol

LIMIT = 4096
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n"


class HastyProtocol(BoundedProtocol):
    header_seconds = 0.3
    body_seconds = 0.3


seen: list[list[tuple[bytes, bytes]]] = []  # the headers of each request
gone = threading.Event()  # a request to /wait was told so


async def echo(scope, receive, send) -> None:
    """Answers with the body; /slow takes longer than any time-out, /early reads no body, /wait
    answers when the client has gone."""
    seen.append(scope["headers"])
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/wait":
        async with asyncio.timeout(20):
            while (await receive())["type"] != "http.disconnect":
                pass
        gone.set()
    if scope["path"] == "/slow":
        for _ in range(8):
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": b".", "more_body": True})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        echo,
        http=HastyProtocol,
        log_config=None,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=LIMIT,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: server.run([listener]))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


class Caller:
    """A connection that sends what a test likes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)

    def send(self, *parts: bytes, pause: float = 0.0) -> None:
        for part in parts:
            self.socket.sendall(part)
            time.sleep(pause)

    def rest(self) -> bytes:
        """Everything until the server closes."""
        data = b""
        with self.socket:
            while part := self.socket.recv(65536):
                data += part
        return data


@pytest.fixture
def caller(port: int) -> Iterator[Caller]:
    caller = Caller(port)
    yield caller
    caller.socket.close()


def error_of(answer: bytes) -> dict[str, str]:
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]


def test_a_whole_request_is_answered_however_it_is_cut(caller: Caller):
    caller.send(HEAD[:20], HEAD[20:], b"connection: close\r\n\r\n", b"01234", b"56789", pause=0.02)
    assert caller.rest().endswith(b"\r\n\r\na\r\n0123456789\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((), id="nothing"),
        pytest.param((HEAD[:10],), id="part of the request line"),
        pytest.param((HEAD,), id="headers without an end"),
        pytest.param((HEAD + b"\r\n", b"01234"), id="part of the body"),
        pytest.param(tuple(HEAD[i : i + 1] for i in range(20)), id="a byte at a time"),
    ],
)
def test_who_does_not_go_on_is_cut_off(caller: Caller, parts: tuple[bytes, ...]):
    caller.send(*parts)
    began = time.monotonic()
    assert caller.rest() == b""
    assert time.monotonic() - began < 3


def test_a_header_that_never_ends_is_431_before_it_fills_memory(caller: Caller):
    caller.send(HEAD + b"x-long: " + b"a" * (2 * LIMIT))
    answer = caller.rest()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_of(answer)["code"] == "headers_too_large"
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", answer)


def test_a_431_has_the_callers_id_if_it_came_before_the_end(caller: Caller):
    caller.send(HEAD + b"X-Request-Id: mine\r\nx-long: " + b"a" * (2 * LIMIT))
    assert b"\r\nx-request-id: mine\r\n" in caller.rest()


def test_a_body_larger_than_the_headers_may_be_is_let_through(caller: Caller):
    size = 5 * LIMIT
    head = HEAD.replace(b"10", str(size).encode()) + b"connection: close\r\n\r\n"
    caller.send(head, b"~" * size)
    assert caller.rest().count(b"~") == size


def test_a_long_body_may_come_slowly(caller: Caller):
    size = 1 << 19  # two seconds more than the time-out
    head = HEAD.replace(b"10", str(size).encode()) + b"connection: close\r\n\r\n"
    caller.send(head, b"~" * (size // 2), b"~" * (size // 2), pause=HastyProtocol.body_seconds)
    assert caller.rest().count(b"~") == size


def test_what_is_not_http_is_400_in_the_form_of_every_error(caller: Caller):
    caller.send(b"\x16\x03\x01 this is no request\r\n\r\n")
    answer = caller.rest()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["code"] == "invalid_http"
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", answer)


def test_an_answer_longer_than_the_time_outs_is_not_cut(caller: Caller):
    caller.send(HEAD.replace(b"/x", b"/slow") + b"connection: close\r\n\r\n0123456789")
    assert caller.rest().count(b"1\r\n.\r\n") == 8


def test_half_of_a_next_request_does_not_cut_the_answer_before_it(caller: Caller):
    caller.send(HEAD.replace(b"/x", b"/slow") + b"\r\n0123456789" + HEAD[:20])
    assert caller.rest().count(b"1\r\n.\r\n") == 8


@pytest.mark.parametrize("sent_ahead", [0, 1, 5])
def test_a_client_that_goes_is_noticed_even_if_it_has_sent_further_requests(
    caller: Caller, sent_ahead: int
):
    gone.clear()
    caller.send(HEAD.replace(b"/x", b"/wait") + b"\r\n0123456789")
    assert caller.socket.recv(4096).startswith(b"HTTP/1.1 200")
    caller.send(*[HEAD + b"\r\n0123456789"] * sent_ahead, pause=0.02)
    caller.socket.close()
    assert gone.wait(10)


def test_who_closes_its_own_half_still_gets_quick_answers_to_what_was_sent_ahead(caller: Caller):
    caller.send((HEAD + b"\r\n0123456789") * 5)
    caller.socket.shutdown(socket.SHUT_WR)
    # Once the last one alone is left, the end of the half is read, and is that of the connection.
    assert caller.rest().count(b"0123456789") >= 4


CHUNKS = b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings, close\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("body", [b"content-length: 5\r\n\r\nhello", CHUNKS])
@pytest.mark.parametrize("cut", [0, 30, 100, -7, -2])
def test_a_request_that_offers_an_upgrade_is_answered_with_its_body(
    port: int, protocol: bytes, body: bytes, cut: int
):
    data = b"POST /x?a=b HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"upgrade: " + protocol
    data += b"\r\n" + body
    caller = Caller(port)
    caller.send(data[:cut], data[cut:], pause=0.02)
    answer = caller.rest()
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert b"hello" in answer


def test_pipelined_requests_that_offer_an_upgrade_are_all_answered(port: int):
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\ncontent-length: 3\r\n"
    ask = head + b"connection: upgrade\r\n\r\n"
    caller = Caller(port)
    caller.send(ask + b"one" + ask + b"two" + head + b"connection: upgrade, close\r\n\r\nend")
    answer = caller.rest()
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b"one") < answer.index(b"two") < answer.index(b"end")


@pytest.mark.parametrize(("path", "answer"), [("/x", b""), ("/slow", b"." * 8)])
def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection(
    caller: Caller, path: str, answer: bytes
):
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"/x", path.encode())
    caller.send(head + b"\r\n0123456789")
    got, body = caller.rest().split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in got and b"connection: close" in got
    assert body == answer + b"0123456789"


def test_connect_is_refused(port: int):
    caller = Caller(port)
    caller.send(b"CONNECT /x HTTP/1.1\r\nhost: x\r\n\r\n")
    assert caller.rest().startswith(b"HTTP/1.1 400")


TRAILED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
LAST = b"\r\n5\r\nhello\r\n0\r\n"  # what follows is trailers


def test_a_trailer_is_no_header(caller: Caller):
    trailer = b"authorization: Bearer key\r\norigin: here\r\n\r\n"
    caller.send(TRAILED + b"connection: close\r\n" + LAST, trailer, pause=0.02)
    assert b"hello" in caller.rest()
    assert [name for name, _ in seen[-1]] == [b"host", b"transfer-encoding", b"connection"]


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * LIMIT, b"a: " + b"b" * 6 * LIMIT])
def test_trailers_have_the_limit_of_headers(caller: Caller, trailers: bytes):
    caller.send(TRAILED + LAST, trailers[:LIMIT], trailers[LIMIT:], pause=0.02)
    answer = caller.rest()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_of(answer)["code"] == "headers_too_large"
    assert len(seen[-1]) == 2


def test_trailers_after_the_answer_end_the_connection_and_are_not_kept(caller: Caller):
    caller.send(TRAILED.replace(b"/x", b"/early") + LAST, pause=0.1)
    caller.send(b"a: b\r\n" * LIMIT)
    answer = caller.rest()
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert len(seen[-1]) == 2
