"""What every request passes before its route: pure ASGI, because it stands in every stream's way.

    Edge      request id, limits of headers and body, encodings, drain, the count of HTTP answers
    KeyGuard  the API key; see key_guard.py

Both decide on the raw path of the connection; nothing that a header says can move it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.connection import CROWDED
from server.exchange import REQUEST_ID, exchange
from server.key_guard import PUBLIC_PATHS, KeyGuard
from server.refusal import CLOSE, Headers, refuse
from server.state import ServerState

WATCHING_PATHS = PUBLIC_PATHS | {"/metrics"}  # answered whatever the load, and during the drain
GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
MAX_HEADERS = 100
UPLOAD_PATH = "/v1/files"
FORM_BYTES = 64 << 10  # of an upload beside its file
MOST_BODIES = 64  # of the largest, which open requests may hold together
DISCARD_SECONDS = 2.0
DISCARD_BYTES = 64 << 20


class Gate:
    """How many requests are open, and whether new ones are still let in."""

    def __init__(self) -> None:
        self.open_requests = 0
        self.body_bytes = 0  # of the open requests
        self.draining = False


class BodyRefused(Exception):
    """More bytes arrived than are taken.  Its arguments are those of `refuse`."""


def install(app: FastAPI, state: ServerState) -> None:
    """Put the middleware around `app`; the Gate is at `app.state.gate`."""
    gate = app.state.gate = Gate()
    origins = state.config.allowed_origins
    if state.config.api_keys:
        app.add_middleware(KeyGuard, keys=state.config.api_keys)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Edge, state=state, gate=gate)


class Edge:
    """Bounds what a request may be, names it, and counts the answer."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: Gate) -> None:
        self._app = app
        self._state = state
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await _Exchange(self._app, self._state, self._gate, scope).run(receive, send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: Gate, scope: Scope) -> None:
        self._app, self._state, self._gate, self._scope = app, state, gate, scope
        self._headers: Headers = scope["headers"]
        self._began = time.perf_counter()
        self._received = 0  # bytes of the body
        self._held = 0  # of them in memory
        self._status = 0

    async def run(self, receive: Receive, send: Send) -> None:
        self._request_id = self._choose_id()
        known: dict[str, object] = self._scope.setdefault("state", {})
        known[REQUEST_ID] = self._request_id.decode()
        exchange.set(known)

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                headers: Headers = [*message["headers"], *self._own_headers()]
                leave = self._gate.draining or CROWDED in self._scope
                if leave and CLOSE[0] not in headers:
                    headers += CLOSE  # the next request should find another server
                message = {**message, "headers": headers}
            await send(message)

        self._gate.open_requests += 1
        try:
            await self._guarded(receive, start)
        except BodyRefused as refusal:
            if not self._status:
                await self._discard(receive)
                await refuse(start, *refusal.args)
        except Exception:
            self._status = self._status or 500  # answered outside of us
            raise
        finally:
            self._gate.open_requests -= 1
            self._let_go()
            self._state.metrics.http_request(self._route(), self._status or 499)

    async def _guarded(self, receive: Receive, send: Send) -> None:
        refusal = self._refusal()
        if refusal is not None:
            await refuse(send, *refusal)
            return

        async def limited() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._take(len(message.get("body", b"")))
            return message

        await self._app(self._scope, limited, send)

    def _take(self, num_bytes: int) -> None:
        """Count bytes of the body.  Raises BodyRefused."""
        self._received += num_bytes
        if self._received > self._limit():
            raise BodyRefused(413, self._too_large(), "request_too_large", CLOSE)
        if self._is_upload():
            return  # it goes to the disk
        self._held += num_bytes
        self._gate.body_bytes += num_bytes
        most = MOST_BODIES * self._state.config.max_body_bytes
        if self._gate.body_bytes > most:
            self._let_go()
            self._state.metrics.rejected("bodies_full")
            message = f"the bodies of open requests have more than {most} bytes: try again later"
            raise BodyRefused(429, message, "rate_limit_exceeded", [*CLOSE, (b"retry-after", b"1")])

    def _let_go(self) -> None:
        self._gate.body_bytes -= self._held
        self._held = 0

    def _refusal(self) -> tuple[int, str, str, Headers] | None:
        """Status, message, code and headers of the answer to what is not let in."""
        config = self._state.config
        size = sum(len(name) + len(value) for name, value in self._headers)
        if size > config.max_header_bytes or len(self._headers) > MAX_HEADERS:
            message = (
                f"the request has {len(self._headers)} headers of {size} bytes: at most "
                f"{MAX_HEADERS} headers of {config.max_header_bytes} bytes are taken"
            )
            return 431, message, "headers_too_large", CLOSE
        fields = dict(self._headers)
        length = fields.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit():
            return 413, self._too_large(), "request_too_large", CLOSE
        encoding = fields.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            shown = encoding[:40].decode("latin-1")
            message = f"the body has the Content-Encoding {shown}: send it without compression"
            return 415, message, "unsupported_media_type", CLOSE
        if self._scope["path"] in WATCHING_PATHS:
            return None
        if self._gate.draining:
            message = "the server is shutting down: send the request to another one"
            return 503, message, "draining", [*CLOSE, (b"retry-after", b"5")]
        if CROWDED in self._scope:
            self._state.metrics.rejected("connections_full")
            message = (
                f"{self._scope[CROWDED]} connections have a request in flight, as many as the "
                "limit of open files allows: try again later"
            )
            return 429, message, "rate_limit_exceeded", [*CLOSE, (b"retry-after", b"1")]
        return None

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a caller that is still sending would not see the answer."""
        left = DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> str:
        return f"the body is larger than {self._limit()} bytes: send less"

    def _limit(self) -> int:
        """How many bytes the body may have."""
        config = self._state.config
        return config.max_file_bytes + FORM_BYTES if self._is_upload() else config.max_body_bytes

    def _is_upload(self) -> bool:
        return bool(self._state.config.data_dir) and self._scope["path"] == UPLOAD_PATH

    def _choose_id(self) -> bytes:
        for name, value in self._headers:
            if name == b"x-request-id" and GIVEN_ID.fullmatch(value):
                return value
        return uuid.uuid4().hex.encode()

    def _own_headers(self) -> Headers:
        milliseconds = (time.perf_counter() - self._began) * 1000
        own = [
            (b"x-request-id", self._request_id),
            (b"openai-processing-ms", str(int(milliseconds)).encode()),
        ]
        if self._scope["method"] == "POST" and self._scope["path"].startswith("/v1/"):
            own += self._rate_limit()
        return own

    def _rate_limit(self) -> Headers:
        """OpenAI's words for the queue: what it takes, and how much more just now."""
        limit = self._state.config.max_queue
        left = max(0, limit - self._state.client.pending)
        return [
            (b"x-ratelimit-limit-requests", str(limit).encode()),
            (b"x-ratelimit-remaining-requests", str(left).encode()),
            (b"x-ratelimit-reset-requests", b"0s" if left else b"1s"),
        ]

    def _route(self) -> str:
        """The pattern of the route that answered: what a caller wrote is never a label."""
        route = self._scope.get("route")
        path = getattr(route, "path", None)
        return path if isinstance(path, str) else "none"
