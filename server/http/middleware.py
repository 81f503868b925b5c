"""What every request passes before its route: pure ASGI, because it stands in every stream's way.

    RequestMiddleware  request id, the count of HTTP answers
    CORSMiddleware     lets browsers show pages of --allowed-origins the answers, errors too
    Bounds             limits of headers and body, encodings, drain; 500 for an unforeseen failure
    ApiKeyMiddleware   the API key; see server/http/api_keys.py
    BrowserGuard       Host and Origin, which name the page; see server/http/browser_guard.py

All decide on the raw path of the connection; nothing that a header says can move it.  A Host or
Origin that is not allowed is reported only to a caller with a key, if one is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import internal_error
from server.generation.admission import Reason, full
from server.http.api_keys import PUBLIC_PATHS, ApiKeyMiddleware
from server.http.browser_guard import BrowserGuard
from server.http.connection import CONNECTIONS_FULL
from server.http.refusal import CLOSE, Headers, refuse, send_error
from server.http.request_context import REQUEST_ID, exchange, id_for
from server.state import ServerState

WATCHING_PATHS = PUBLIC_PATHS | {"/metrics"}  # answered whatever the load, and during the drain
MAX_HEADERS = 100
UPLOAD_PATH = "/v1/files"
FORM_BYTES = 64 << 10  # of an upload beside its file
MAX_BODIES = 64  # of the largest, which open requests may hold together
DISCARD_SECONDS = 2.0
DISCARD_BYTES = 64 << 20
EXPOSED = ("X-Request-Id", "Retry-After")  # to pages, which read no other headers of ours


class DrainState:
    """How many requests are open, and whether new ones are still admitted."""

    def __init__(self) -> None:
        self.open_requests = 0
        self.body_bytes = 0  # of the open requests
        self.draining = False


class BodyRefused(Exception):
    """More bytes arrived than are taken.  Its arguments are those of `refuse`."""


def install(app: FastAPI, state: ServerState) -> None:
    """Put the middleware around `app`; its DrainState is at `app.state.drain_state`."""
    gate = app.state.drain_state = DrainState()
    origins = state.config.allowed_origins
    app.add_middleware(BrowserGuard, config=state.config)
    if state.config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=state.config.api_keys)
    app.add_middleware(Bounds, state=state, gate=gate)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    app.add_middleware(RequestMiddleware, state=state, gate=gate)


class RequestMiddleware:
    """Names every request, and counts its answer."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: DrainState) -> None:
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

    def __init__(self, app: ASGIApp, state: ServerState, gate: DrainState, scope: Scope) -> None:
        self._app, self._state, self._gate, self._scope = app, state, gate, scope
        self._began = time.perf_counter()
        self._status = 0

    async def run(self, receive: Receive, send: Send) -> None:
        self._request_id = id_for(self._scope["headers"])
        known: dict[str, object] = self._scope.setdefault("state", {})
        known[REQUEST_ID] = self._request_id.decode()
        exchange.set(known)

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                headers: Headers = [*message["headers"], *self._own_headers()]
                leave = self._gate.draining or CONNECTIONS_FULL in self._scope
                if leave and CLOSE[0] not in headers:
                    headers += CLOSE  # the next request should find another server
                message = {**message, "headers": headers}
            await send(message)

        self._gate.open_requests += 1
        try:
            await self._app(self._scope, receive, start)
        finally:
            self._gate.open_requests -= 1
            self._state.metrics.http_request(self._route(), self._status or 499)

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
        """OpenAI's rate-limit headers: the size of this process's queue, and what is left of it."""
        admission = self._state.admission
        left = admission.available
        return [
            (b"x-ratelimit-limit-requests", str(admission.share).encode()),
            (b"x-ratelimit-remaining-requests", str(left).encode()),
            (b"x-ratelimit-reset-requests", b"0s" if left else b"1s"),
        ]

    def _route(self) -> str:
        """The pattern of the route that answered: what a caller wrote is never a label."""
        route = self._scope.get("route")
        path = getattr(route, "path", None)
        return path if isinstance(path, str) else "none"


class Bounds:
    """Bounds what a request may be, and answers 500 where the application failed to answer."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: DrainState) -> None:
        self._app = app
        self._state = state
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await _Bounded(self._app, self._state, self._gate, scope).run(receive, send)


class _Bounded:
    """One request, whose headers and body are counted."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: DrainState, scope: Scope) -> None:
        self._app, self._state, self._gate, self._scope = app, state, gate, scope
        self._headers: Headers = scope["headers"]
        self._received = 0  # bytes of the body
        self._held = 0  # of them in memory

    async def run(self, receive: Receive, send: Send) -> None:
        refusal = self._refusal()
        if refusal is not None:
            await refuse(send, *refusal)
            return
        answered = complete = False

        async def limited() -> Message:
            nonlocal complete
            message = await receive()
            if message["type"] == "http.request":
                complete = not message.get("more_body")
                self._take(len(message.get("body", b"")))
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(self._scope, limited, noted)
        except BodyRefused as refusal:
            if not answered:
                if not complete:
                    await self._discard(receive)
                await refuse(send, *refusal.args)
        except Exception:
            if not answered:
                await send_error(send, 500, internal_error(), [])
            raise  # the connection logs it
        finally:
            self._let_go()

    def _take(self, num_bytes: int) -> None:
        """Count bytes of the body.  Raises BodyRefused."""
        self._received += num_bytes
        if self._received > self._limit():
            raise BodyRefused(413, self._too_large(), "request_too_large", CLOSE)
        if self._is_upload():
            return  # it goes to the disk
        self._held += num_bytes
        self._gate.body_bytes += num_bytes
        most = MAX_BODIES * self._state.config.max_body_bytes
        if self._gate.body_bytes > most:
            self._let_go()
            message = f"the bodies of open requests have more than {most} bytes: try again later"
            raise BodyRefused(*self._full("bodies_full", message))

    def _full(self, reason: Reason, message: str) -> tuple[int, str, str, Headers]:
        self._state.metrics.rejected(reason)
        refusal = full(reason, message)
        again = [(name.encode(), text.encode()) for name, text in refusal.headers().items()]
        return refusal.status, refusal.message, refusal.code, [*CLOSE, *again]

    def _let_go(self) -> None:
        self._gate.body_bytes -= self._held
        self._held = 0

    def _refusal(self) -> tuple[int, str, str, Headers] | None:
        """Status, message, code and headers of the answer to a request that is not admitted."""
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
        if CONNECTIONS_FULL in self._scope:
            message = (
                f"{self._scope[CONNECTIONS_FULL]} connections have a "
                f"request in flight, as many as the "
                "limit of open files allows: try again later"
            )
            return self._full("connections_full", message)
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
