"""One HTTP connection: uvicorn's protocol, bounded before a request reaches the application.

uvicorn's own limit of header bytes holds for its h11 protocol only, and it waits for ever for the
rest of a request that was begun, and for a client to read its answer.  It takes the trailers of a
chunked body for headers, however many come.  Its parser loses the body of a request that offers an
upgrade, as those of Java's HTTP client do: a server that does not upgrade has to answer in
HTTP/1.1.  It stops reading when a request comes before the one before it is answered, and then does
not notice that the client has gone.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Message, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import INVALID_REQUEST, error_body
from server.http.connection_limit import ConnectionLimit
from server.http.request_context import id_for
from server.http.unread import UnreadAnswers, unacknowledged

DIRECT = "wavefill.send"  # in a request's scope: the connection's own `send`
# In a request's scope: how many connections may be busy, if more are.
CONNECTIONS_FULL = "wavefill.connections_full"
BODY_BYTES_A_SECOND = 256 << 10  # a body that says how long it is may come this slowly
MAX_BODY_SECONDS = 3000.0
GONE = select.POLLERR | select.POLLHUP | getattr(select, "POLLRDHUP", 0)  # Linux has the last one


def outlet(send: Send | None) -> Callable[[bytes], bool] | None:
    """Writes a chunk of an answer's body at once; for the `send` of one of uvicorn's connections.

    It returns False where `send` would wait or do nothing, having written nothing: before the
    head of the answer, while the client does not read, and when it has gone.  A coroutine and a
    message for each chunk cost twice as much as the chunk itself.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if not cycle.chunked_encoding:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


def until_close(cycle: RequestResponseCycle) -> Send:
    """The cycle's `send` for a caller who knows HTTP/1.0 only: an answer of unknown length ends
    where the connection does, and is not sent in chunks, whose sizes would be taken for text.
    """
    send = cycle.send
    unknown = False  # how long the answer is

    async def plain(message: Message) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if unknown else None
        elif unknown:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast("Any", message))

    return plain


class BoundedProtocol(HttpToolsProtocol):
    """Closes the connection of a caller whose headers are too large, or who does not go on."""

    header_seconds = 10.0  # from the first byte (or the connection) to the end of the headers
    gone_seconds = 1.0  # between two looks at a client that has sent requests ahead
    body_seconds = 60.0  # from there to the end of the body, and more for a long one
    _deadline: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _in_head = True  # of a message, or before it; otherwise in its body or trailers
    _bytes_beside_body = 0  # read since the message began, or since the last chunk of its body

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        limit: ConnectionLimit | None = None,
        unread: UnreadAnswers | None = None,
    ) -> None:
        """`limit` and `unread` are those of all connections of the process; None for a server of
        one test."""
        super().__init__(config, server_state, app_state, _loop)
        self._limit = limit or ConnectionLimit()
        self._unread = unread or UnreadAnswers()
        self._open: deque[RequestResponseCycle] = (
            deque()
        )  # requests that are not answered, in order

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.header_seconds)
        self._limit.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._limit.closed(self)
        self._unread.resumed(self)
        if self._look is not None:
            self._look.cancel()
        for cycle in self._open:  # uvicorn tells the last one
            cycle.disconnected = True
            cycle.message_event.set()
        self._open.clear()
        super().connection_lost(exc)

    def has_unsent_bytes(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def unread_bytes(self) -> int:
        return self.transport.get_write_buffer_size() + unacknowledged(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.paused(self)

    def resume_writing(self) -> None:
        self._unread.resumed(self)
        super().resume_writing()

    def cut(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Feed the parser.  What the application may hold of a body is the middleware's matter."""
        self._bytes_beside_body += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        # At most one read too many has arrived when this is noticed; the middleware is exact.
        limit = self.config.h11_max_incomplete_event_size or 0
        if self._bytes_beside_body > 2 * limit > 0:
            fields = "headers" if self._in_head else "trailers"
            self._refuse(431, f"the {fields} are larger than {limit} bytes", "headers_too_large")

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes the rest for another protocol: a new one reads the message again.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn's own: what follows a `Connection: close` is no error.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """The request line and headers as they were parsed.  Raises HttpParserError."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":  # an upgrade by itself
            raise httptools.HttpParserError("CONNECT is for proxies")
        kept = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        line = b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())
        return b"%b%b\r\n" % (line, b"".join(kept))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(self.header_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer is dropped: it would pass for a header that was checked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # they come again
        self._in_head = False
        self._bytes_beside_body = 0
        length = dict(self.headers).get(b"content-length", b"")
        more_seconds = int(length[:12]) / BODY_BYTES_A_SECOND if length.isdigit() else 0.0
        self._expect(min(self.body_seconds + more_seconds, MAX_BODY_SECONDS))
        super().on_headers_complete()
        self._open.append(self.cycle)
        if self.pipeline and self._look is None:
            # Not at once: who has closed its own half only may wait for quick answers.
            self._look = self.loop.call_later(self.gone_seconds, self._look_for_client)
        # What uvicorn hands the application is the same: it has not run yet.
        if self.parser.get_http_version() == "1.0":
            vars(self.cycle)["send"] = until_close(self.cycle)
        scope = cast("dict[str, object]", self.scope)
        scope[DIRECT] = self.cycle.send
        if not self._limit.request_begun(self):
            scope[CONNECTIONS_FULL] = self._limit.max_busy

    def on_body(self, body: bytes) -> None:
        self._bytes_beside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._expect(None)
        self._in_head = True
        self._bytes_beside_body = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._open:
            self._open.popleft()
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            # uvicorn reads on, and would read the end of a half that its client has closed: then
            # what the client has sent before would not be answered.
            self.flow.pause_reading()
        if self.cycle.response_complete:  # otherwise it is that of a request sent ahead
            self._limit.request_ended(self)

    def _look_for_client(self) -> None:
        """Notice the end of a connection that is not read, as long as requests wait in it."""
        self._look = None
        if not self.pipeline or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), GONE)
        if poll.poll(0):
            self.cut()
        else:
            self._look = self.loop.call_later(self.gone_seconds, self._look_for_client)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the form of every other error."""
        self._refuse(400, "the request is not valid HTTP", "invalid_http")

    def _expect(self, seconds: float | None) -> None:
        """Close the connection unless this is called again in time."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._deadline = None
        cycle = cast("RequestResponseCycle | None", self.cycle)
        answering = cycle is not None and not cycle.response_complete
        if answering and self._in_head:
            # An answer is on its way, and its caller has begun to send the next request.
            self._expect(self.header_seconds)
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        if self._has_begun_to_answer():
            self.transport.close()  # another answer would be taken for a part of this one
            return
        body = error_body(message, INVALID_REQUEST, None, code)
        request_id = id_for(self.headers or ()).decode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _has_begun_to_answer(self) -> bool:
        """Whether an answer is on its way: to this message, or to one before it."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None:
            return False
        if self._in_head:
            return not cycle.response_complete
        return cycle.response_started or bool(self.pipeline)
