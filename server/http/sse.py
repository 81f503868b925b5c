"""Server-sent events, and noticing that the client has gone.

    data: {...}\\n\\n     one chunk
    : keep-alive\\n\\n    after 15 s of silence, so that proxies keep the connection
    data: [DONE]\\n\\n    the end

The status line waits for the first event or keep-alive: what fails before is a plain error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import INTERNAL_ERROR, RequestError, internal_error
from server.http.connection import DIRECT, outlet
from server.http.request_context import CLIENT_GONE, RECEIVE, exchange, note_error

T = TypeVar("T")
V = TypeVar("V")

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"


def frame_of(data: bytes, event: str = "") -> bytes:
    """One event that holds `data`; the type `event` is left out if it is ""."""
    head = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (head, data)


def frame(data: object, event: str = "") -> bytes:
    """One event of this type that holds `data` as JSON."""
    return frame_of(orjson.dumps(data), event)


DONE = frame_of(b"[DONE]")


class StreamFormat(NamedTuple):
    """What a stream needs besides the frames that its route writes."""

    media_type: str
    done: bytes  # the end
    keep_alive: bytes  # sent after a long silence; b"" sends nothing
    failed: Callable[[bytes], bytes]  # OpenAI's error body -> the frame that reports it


OPENAI = StreamFormat("text/event-stream; charset=utf-8", DONE, KEEP_ALIVE, frame_of)


class ClientGone(Exception):
    """The client closed its connection."""


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], close: Callable[[], None]
) -> T:
    """The result of `work`, which is cancelled when the client goes away; then `close` is called.

    Raises ClientGone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        exchange.get({})[CLIENT_GONE] = True
        raise ClientGone
    finally:
        watching.cancel()
        working.cancel()
        try:
            await asyncio.gather(working, watching, return_exceptions=True)
        finally:
            close()


async def while_wanted(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` for the request that this task answers, whose body has been read; it is
    cancelled if the client goes away.

    Raises ClientGone.
    """
    receive = exchange.get({}).get(RECEIVE)  # a batch has none
    return await (work if receive is None else while_connected(receive, work, lambda: None))


def line(data: object) -> bytes:
    """A frame of newline-delimited JSON."""
    return orjson.dumps(data) + b"\n"


def split_frames(data: bytes) -> list[bytes]:
    """The events of which `data` consists."""
    return [each + b"\n\n" for each in data.split(b"\n\n")[:-1]]


class DeltaFrame:
    """The frame of a chunk that differs from the last one in few values: the bytes around them."""

    __slots__ = ("_after", "_before", "_rest")

    MARK = "\u0000here\u0000"

    def __init__(self, chunk: Mapping[str, object], event: str = "") -> None:
        """`chunk` holds MARK where a value goes; `event` is the frame's type."""
        parts = frame(chunk, event).split(orjson.dumps(self.MARK))
        self._before, self._after, *self._rest = parts

    def of(self, text: str, *more: object) -> bytes:
        """`more` are the values after the first."""
        data = self._before + orjson.dumps(text) + self._after
        if more:
            for value, after in zip(more, self._rest, strict=True):
                data += orjson.dumps(value) + after
        return data


class EventWriter:
    """Sends frames; the first one is preceded by status and headers."""

    __slots__ = ("_direct", "_format", "_headers", "_outlet", "_send", "last", "started")

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        direct: Send | None = None,
        stream_format: StreamFormat = OPENAI,
    ) -> None:
        """`direct` is the connection's `send`, if it is known: the middleware in between
        looks at the head of an answer only, and costs more than a frame."""
        self._send = send
        self._direct = direct or send
        self._outlet = outlet(direct)
        self._headers = headers
        self._format = stream_format
        self.started = False
        self.last = time.monotonic()

    async def write(self, data: bytes) -> None:
        """Send whole frames; returns when the transport has room for more."""
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        self.last = time.monotonic()
        await self._direct({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> bool:
        """Send whole frames without waiting.  False if that is not possible: nothing was sent."""
        if not self.started or self._outlet is None or not self._outlet(data):
            return False
        self.last = time.monotonic()
        return True

    async def end(self) -> None:
        done = self._format.done
        await self._send({"type": "http.response.body", "body": done, "more_body": False})

    async def fail(self, body: bytes) -> None:
        """End a stream that has begun with OpenAI's error body."""
        await self.write(self._format.failed(body))
        await self.end()

    async def keep_alive(self) -> None:
        """Send the format's keep-alive after every silence; ends only when cancelled."""
        while self._format.keep_alive:
            silence = time.monotonic() - self.last
            if silence >= KEEP_ALIVE_SECONDS:
                await self.write(self._format.keep_alive)
                silence = 0.0
            await asyncio.sleep(KEEP_ALIVE_SECONDS - silence)


class FrameWriter(Protocol):
    """An EventWriter, or who keeps frames for later readers."""

    async def write(self, data: bytes) -> None: ...
    def write_now(self, data: bytes) -> bool: ...


class FrameSink(Generic[V]):
    """Writes the frames of chunks: without waiting while the writer has room."""

    __slots__ = ("_render", "_unsent", "_writer")

    def __init__(self, writer: FrameWriter, render: Callable[[V], bytes]) -> None:
        """`render` makes the frames of a chunk; b"" if it has none."""
        self._writer = writer
        self._render = render
        self._unsent = b""

    def put(self, chunk: V) -> bool:
        """Write a chunk's frames.  False: `room` must be awaited before the next chunk."""
        data = self._render(chunk)
        if not data or self._writer.write_now(data):
            return True
        self._unsent = data
        return False

    async def room(self) -> None:
        """Write what `put` could not."""
        data, self._unsent = self._unsent, b""
        if data:
            await self._writer.write(data)


class EventStream(Response):
    """Runs `produce(writer)` and sends its frames, and the format's end after them.

    A RequestError before the first frame is raised; after it, it becomes an error frame.
    `close` is called however it ends, also if the client goes before `produce` begins.
    """

    def __init__(
        self,
        produce: Callable[[EventWriter], Awaitable[None]],
        close: Callable[[], None],
        stream_format: StreamFormat = OPENAI,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._produce = produce
        self._close = close
        self._format = stream_format
        self.raw_headers = [
            (b"content-type", stream_format.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, self.raw_headers, scope.get(DIRECT), self._format)
        with suppress(ClientGone):  # the client is gone: an answer would reach no reader
            await while_connected(receive, self._run(writer), self._close)

    async def _run(self, writer: EventWriter) -> None:
        silence = asyncio.ensure_future(writer.keep_alive())
        try:
            await self._produce(writer)
            await writer.end()
        except RequestError as error:
            if not writer.started:
                raise
            note_error(error.code)
            await writer.fail(error.body())
        except Exception:
            if writer.started:  # the reader gets an error frame, the log the traceback
                note_error(INTERNAL_ERROR)
                await writer.fail(internal_error())
            raise
        finally:
            silence.cancel()
