"""What every request passes before its route: pure ASGI, because it stands in every stream's way.

    RequestMiddleware  request id; what is recorded of every request (server/telemetry/)
    CORSMiddleware     lets browsers show pages of --allowed-origins the answers, errors too
    Bounds             limits of headers and body, encodings, drain; 500 for an unforeseen failure
    ApiKeyMiddleware   the API key; see server/http/access.py
    BrowserGuard       Host and Origin, which name the page; see server/http/access.py

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

from server.errors import INTERNAL_ERROR, internal_error
from server.generation.admission import Reason, full
from server.http.access import (
    CLOSE,
    ApiKeyMiddleware,
    ApiKeys,
    BrowserGuard,
    Headers,
    refuse,
    send_error,
)
from server.http.connection import CONNECTIONS_FULL
from server.http.paths import WATCHING_PATHS, is_routine
from server.http.request_context import RECEIVE, REQUEST_ID, exchange, id_for, note_error
from server.state import ServerState
from server.telemetry.requests import CLIENT_CLOSED_REQUEST, ObservedRequest, RequestTelemetry

MAX_HEADERS = 100
UPLOAD_PATH = "/v1/files"
FORM_BYTES = 64 << 10  # of an upload beside its file
MAX_BODIES = 64  # of the largest, which open requests may hold together
DISCARD_SECONDS = 2.0
DISCARD_BYTES = 64 << 20
EXPOSED = ("X-Request-Id", "Retry-After")  # to pages, which read no other headers of ours


class DrainState:
    """How many requests are open, and whether the server is about to end."""

    def __init__(self) -> None:
        self.open_requests = 0
        self.body_bytes = 0  # of the open requests
        self.draining = False  # callers should go elsewhere; they are served all the same
        self.ended = False  # the engine has been let go: new requests are refused


class BodyRefused(Exception):
    """More bytes arrived than are taken.  Its arguments are those of `refuse`."""


def install(app: FastAPI, state: ServerState) -> None:
    """Put the middleware around `app`; `app.state` gets its `drain_state` and `api_keys`."""
    gate = app.state.drain_state = DrainState()
    keys = app.state.api_keys = ApiKeys(state.config.api_keys)
    origins = state.config.allowed_origins
    app.add_middleware(BrowserGuard, config=state.config)
    if state.config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    app.add_middleware(bounds, state=state, gate=gate)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # Browsers ask it of a page on the internet before a server at home or on a LAN.
            allow_private_network=True,
            expose_headers=EXPOSED,
        )
    app.add_middleware(RequestMiddleware, state=state, gate=gate)


class RequestMiddleware:
    """Names every request, and tells of it."""

    def __init__(self, app: ASGIApp, state: ServerState, gate: DrainState) -> None:
        self._app = app
        self._state = state
        self._gate = gate
        self._telemetry = RequestTelemetry(
            state.metrics,
            log_requests=state.config.log_requests,
            tracing=state.tracing,
            is_routine=is_routine,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST
        request_id = id_for(scope["headers"])
        known: dict[str, object] = scope.setdefault("state", {})
        known[REQUEST_ID] = request_id.decode()
        known[RECEIVE] = receive
        exchange.set(known)
        observed = self._telemetry.begin(scope)

        async def start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = self._own_headers(scope, request_id, observed)
                headers: Headers = [*message["headers"], *own]
                leave = self._gate.draining or CONNECTIONS_FULL in scope
                if leave and CLOSE[0] not in headers:
                    headers += CLOSE  # the next request should find another server
                message = {**message, "headers": headers}
            await send(message)

        self._gate.open_requests += 1
        try:
            await self._app(scope, receive, start)
        finally:
            self._gate.open_requests -= 1
            observed.end(status)

    def _own_headers(self, scope: Scope, request_id: bytes, observed: ObservedRequest) -> Headers:
        seconds = time.monotonic() - observed.began
        own = [
            (b"x-request-id", request_id),
            (b"openai-processing-ms", str(int(seconds * 1000)).encode()),
            *observed.headers(),
        ]
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            # OpenAI's rate limit is the size of this process's queue here.
            admission = self._state.admission
            available = admission.available
            own += [
                (b"x-ratelimit-limit-requests", str(admission.share).encode()),
                (b"x-ratelimit-remaining-requests", str(available).encode()),
                (b"x-ratelimit-reset-requests", b"0s" if available else b"1s"),
            ]
        return own


def bounds(app: ASGIApp, state: ServerState, gate: DrainState) -> ASGIApp:
    """Bounds what a request may be, and answers 500 where the application failed to answer."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Bounds(app, state, gate, scope).run(receive, send)
        else:
            await app(scope, receive, send)

    return bounded


class Bounds:
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

        async def noting_start(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(self._scope, limited, noting_start)
        except BodyRefused as refusal:
            if not answered:
                if not complete:
                    await self._discard(receive)
                await refuse(send, *refusal.args)
        except Exception:
            note_error(INTERNAL_ERROR)
            if not answered:
                await send_error(send, 500, internal_error(), [])
            raise  # the connection logs it
        finally:
            self._release()

    def _take(self, num_bytes: int) -> None:
        """Count bytes of the body.  Raises BodyRefused."""
        self._received += num_bytes
        if self._received > self._limit():
            raise BodyRefused(413, self._too_large(), "request_too_large", CLOSE)
        if self._is_upload():
            return  # it goes to the disk
        self._held += num_bytes
        self._gate.body_bytes += num_bytes
        limit = MAX_BODIES * self._state.config.max_body_bytes
        if self._gate.body_bytes > limit:
            self._release()
            message = (
                f"the bodies of open requests have more than {limit} bytes: try again later (the "
                "operator can raise --max-body-bytes)"
            )
            raise BodyRefused(*self._full("bodies_full", message))

    def _full(self, reason: Reason, message: str) -> tuple[int, str, str, Headers]:
        self._state.metrics.rejected(reason)
        refusal = full(reason, "{}", message)
        headers = [(name.encode(), text.encode()) for name, text in refusal.headers().items()]
        return refusal.status, refusal.message, refusal.code, [*CLOSE, *headers]

    def _release(self) -> None:
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
            name = encoding[:40].decode("latin-1")
            message = f"the body has the Content-Encoding {name}: send it without compression"
            return 415, message, "unsupported_media_type", CLOSE
        if self._scope["path"] in WATCHING_PATHS:
            return None
        if self._gate.ended:
            message = "the server is shutting down: send the request to another one"
            return 503, message, "draining", [*CLOSE, (b"retry-after", b"5")]
        if CONNECTIONS_FULL in self._scope:
            message = (
                f"{self._scope[CONNECTIONS_FULL]} connections have a request in flight, as many "
                "as the limit of open files allows: try again later"
            )
            return self._full("connections_full", message)
        return None

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a caller that is still sending would not see the answer."""
        remaining = DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while remaining > 0:
                    message = await receive()
                    remaining -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> str:
        option = "--max-file-bytes" if self._is_upload() else "--max-body-bytes"
        return (
            f"the body is larger than {self._limit()} bytes: send less (the operator can raise "
            f"{option})"
        )

    def _limit(self) -> int:
        """How many bytes the body may have."""
        config = self._state.config
        return config.max_file_bytes + FORM_BYTES if self._is_upload() else config.max_body_bytes

    def _is_upload(self) -> bool:
        return bool(self._state.config.data_dir) and self._scope["path"] == UPLOAD_PATH
