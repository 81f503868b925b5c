"""Server-sent events, and noticing that the client has gone.

    data: {...}\\n\\n     one chunk
    : keep-alive\\n\\n    after 15 s of silence, so that proxies keep the connection
    data: [DONE]\\n\\n    the end

The status line waits for the first event: what fails before it is a plain error response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import RequestError, internal_error

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.  Raises ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def frame(data: object) -> bytes:
    """One event that holds `data` as JSON."""
    return b"data: %b\n\n" % orjson.dumps(data)


class DeltaFrame:
    """The frame of a chunk that differs from the last one in one value: the bytes around it."""

    __slots__ = ("_after", "_before")

    MARK = "\u0000here\u0000"

    def __init__(self, chunk: Mapping[str, object]) -> None:
        """`chunk` holds MARK where the value goes."""
        self._before, self._after = frame(chunk).split(orjson.dumps(self.MARK))

    def of(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after


class ShortCut:
    """Outermost middleware: lets the frames of a stream pass by the others.

    They look at the head of an answer only, and five of them cost 2 us a streamed token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ShortCut.__name__] = send
        await self._app(scope, receive, send)


class EventWriter:
    """Sends frames; the first one is preceded by status and headers."""

    __slots__ = ("_direct", "_headers", "_send", "last", "started")

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], direct: Send | None = None
    ) -> None:
        """`direct` is the server's own end of `send`, if it is known."""
        self._send = send
        self._direct = direct or send
        self._headers = headers
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

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def keep_alive(self) -> None:
        """Break every silence with a comment; ends only when cancelled."""
        while True:
            silence = time.monotonic() - self.last
            if silence >= KEEP_ALIVE_SECONDS:
                await self.write(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(KEEP_ALIVE_SECONDS - silence)


class EventStream(Response):
    """Runs `produce(writer)` and sends its frames, [DONE] at the end.

    A RequestError before the first frame is raised; after it, it becomes an error frame.
    `close` is called however it ends, also if the client goes before `produce` begins.
    """

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[EventWriter], Awaitable[None]], close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._produce = produce
        self._close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        wanted = {"content-type": "text/event-stream; charset=utf-8", **(headers or {})}
        self.raw_headers = [(key.encode(), value.encode()) for key, value in wanted.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, self.raw_headers, scope.get(ShortCut.__name__))
        try:
            await while_connected(receive, self._run(writer))
        except ClientGone:
            pass  # nobody is left to be told
        finally:
            self._close()

    async def _run(self, writer: EventWriter) -> None:
        silence = asyncio.ensure_future(writer.keep_alive())
        try:
            await self._produce(writer)
            await writer.end()
        except RequestError as error:
            if not writer.started:
                raise
            await writer.write(b"data: %b\n\n" % error.body())
            await writer.end()
        except Exception:
            if writer.started:  # the reader is told, the server's log gets the traceback
                await writer.write(b"data: %b\n\n" % internal_error())
                await writer.end()
            raise
        finally:
            silence.cancel()
