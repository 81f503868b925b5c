"""A small HTTP/1.1 client for streams: every chunk of a body gets the time at which it was read.

A general client wakes a task for each chunk, which costs most of what reading a token costs and
delays the time stamp.  Here chunks go to a callback at once.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

OnChunk = Callable[[bytes, float], None]  # a chunk of the body, and when it was read


class ConnectionLost(Exception):
    """The connection could not be made, or ended before an answer had begun."""


class ResponseCut(Exception):
    """The connection ended within an answer."""


class Connection(asyncio.Protocol):
    """One connection, and the exchange that is under way on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[int] | None = None
        self._on_status: Callable[[int], OnChunk] | None = None
        self._on_chunk: OnChunk | None = None
        self._now = 0.0
        self._sized = False  # the answer says where it ends
        self.exchanges = 0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, on_status: Callable[[int], OnChunk]) -> int:
        """Send a request; the chunks of its answer go to the callback of `on_status(status)`.

        Returns the status at the end of the answer.  Raises ConnectionLost and ResponseCut.
        """
        assert self._transport is not None and self._answered is None
        self._on_status, self._on_chunk, self._sized = on_status, None, False
        self._answered = asyncio.get_running_loop().create_future()
        self.exchanges += 1
        self._transport.write(request)
        try:
            return await self._answered
        finally:
            if not self._answered.done() or self._answered.cancelled():
                self.close()
            self._answered = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ResponseCut(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._on_chunk is None:
            self._fail(ConnectionLost(str(exc or "the server closed the connection")))
        elif self._sized:
            self._fail(ResponseCut(str(exc or "the server closed the connection")))
        else:
            self._end()

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)

    def _end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(self._parser.get_status_code())

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._on_status is not None and status >= 200:
            self._on_chunk = self._on_status(status)

    def on_body(self, body: bytes) -> None:
        if self._on_chunk is not None:
            try:
                self._on_chunk(body, self._now)
            except Exception as error:
                self._fail(error)
                self.close()

    def on_message_complete(self) -> None:
        if self._on_chunk is None:
            return  # 100 Continue or another interim response
        if not self._parser.should_keep_alive():
            self.close()
        self._end()


class HttpClient:
    """Requests to one server, each on a connection of its own while it is under way."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        url = urlsplit(base_url)
        self._host = url.hostname or ""
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        self._path = url.path
        lines = [f"host: {url.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "".join(f"{line}\r\n" for line in lines)
        self._idle: list[Connection] = []

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def send(
        self, method: str, path: str, body: bytes, on_status: Callable[[int], OnChunk]
    ) -> int:
        """See Connection.exchange.  Raises ConnectionLost and ResponseCut."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while True:
            connection = await self._connection()
            try:
                status = await connection.exchange(request, on_status)
            except ConnectionLost:
                if connection.exchanges > 1:
                    continue  # the server had closed it, and this request found that out
                raise
            if connection.open:
                self._idle.append(connection)
            return status

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from None
        return connection
