"""The benchmark's HTTP client against servers of a few lines: streams, connections, bad ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from server.bench.client import BenchClient
from server.bench.http import ConnectionLost, HttpClient, OnChunk
from server.bench.metrics import Failure, Outcome, RequestResult
from server.bench.workload import Workload

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WORK = Workload("completions", "m", 3, 4, 1000, False, 0.0, 0)


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """`handler` gets each connection; the base URL."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    return head, await reader.readexactly(length)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b'data: {"choices": [{"text": "b"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
]


async def ask(url: str, *, timeout_s: float = 5.0) -> Outcome:
    async with BenchClient(url, "key", timeout_s) as client:
        return await client.ask(WORK, WORK.body(0), time.perf_counter())


async def test_the_times_are_those_at_which_the_chunks_came() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
        assert "authorization: Bearer key\r\n" in head
        writer.write(STREAM)
        for event in EVENTS:
            await asyncio.sleep(0.05)
            writer.write(chunk(event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with served(handler) as url:
        answer = await ask(url)
    assert isinstance(answer, RequestResult)
    assert answer.output_tokens == 2 and 0.05 <= answer.ttft < 1 and 0.04 <= answer.itl[0] < 1


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_an_answer_cut_anywhere_is_the_same(size: int) -> None:
    whole = STREAM + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for first in range(0, len(whole), size):
            writer.write(whole[first : first + size])
            await asyncio.sleep(0)
        await writer.drain()

    async with served(handler) as url:
        answer = await ask(url)
    assert isinstance(answer, RequestResult) and len(answer.deliveries) == 2


async def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it() -> None:
    connections: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):  # then the server closes it without a word
            await read_request(reader)
            connections[-1] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with served(handler) as url:
        client = HttpClient(url, {})
        for _ in range(6):
            body = bytearray()
            assert await client.send("POST", "/x", b"{}", lambda _: into(body)) == 200  # noqa: B023
            assert body == b"ok"
        client.close()
    assert connections == [2, 2, 2]


def into(body: bytearray) -> OnChunk:
    return lambda received, now: body.extend(received)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connection"),
        (STREAM + chunk(EVENTS[0]), "stream cut off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + EVENTS[0], "stream cut off"),
        (STREAM + chunk(EVENTS[0]) + b"this is no chunk\r\n", "stream cut off"),
        (STREAM + chunk(b"data: {]\n\n") + b"0\r\n\r\n", "malformed answer"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 5\r\n\r\nlater", "HTTP 503"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"".join(EVENTS), None),
    ],
)
async def test_failures_are_counted_by_their_kind(answer: bytes, kind: str | None) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with served(handler) as url:
        outcome = await ask(url)
    if kind is None:  # the end of the connection is the end of the answer
        assert isinstance(outcome, RequestResult)
    else:
        assert isinstance(outcome, Failure) and outcome.kind == kind, outcome


async def test_an_answer_that_does_not_come_times_out_and_its_connection_is_closed() -> None:
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        assert await reader.read() == b""
        gone.set()

    async with served(handler) as url:
        outcome = await ask(url, timeout_s=0.1)
        await asyncio.wait_for(gone.wait(), 5)
    assert isinstance(outcome, Failure) and outcome.kind == "timeout"


async def test_a_port_without_a_listener_is_a_lost_connection() -> None:
    async with served(lambda reader, writer: asyncio.sleep(0)) as url:
        pass
    with pytest.raises(ConnectionLost):
        await HttpClient(url, {}).send("GET", "/models", b"", lambda _: into(bytearray()))


async def test_a_reader_that_fails_ends_the_exchange() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n")
        await reader.read()

    def fail(received: bytes, now: float) -> None:
        raise ZeroDivisionError

    async with served(handler) as url:
        client = HttpClient(url, {})
        with pytest.raises(ZeroDivisionError):
            await client.send("POST", "/x", b"", lambda _: fail)
        client.close()
