"""Errors in the format of the API that a path belongs to.

    Anthropic  {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
    Ollama     {"error": "..."}

Routes and middleware raise and send OpenAI's body everywhere; here it is rewritten on its way out,
so that a missing key or a body that is too large has the same format as a wrong field.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import SERVER_ERROR
from server.http.sse import frame_of
from server.http.validation import fields_of

ANTHROPIC = "/v1/messages"
OLLAMA = "/api/"

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Clients that keep a conversation on the server go on without doing so when they read this.
UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def is_ollama(path: str) -> bool:
    return path.startswith(OLLAMA)


def anthropic_error(body: bytes, status: int, request_id: str | None) -> bytes:
    """Anthropic's body for OpenAI's."""
    error_fields = _error_of(body)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, object] = {"type": kind, "message": error_fields.get("message", "")}
    if (error_fields.get("param"), error_fields.get("code")) == ("thread", "unsupported_parameter"):
        error["details"] = UNTHREADED
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def ollama_error(body: bytes) -> bytes:
    """Ollama's body for OpenAI's."""
    return orjson.dumps({"error": _error_of(body).get("message", "")})


def anthropic_failure(body: bytes) -> bytes:
    """The event that ends a stream which cannot go on."""
    status = 500 if _error_of(body).get("type") == SERVER_ERROR else 400
    return frame_of(anthropic_error(body, status, None), "error")


def ollama_failure(body: bytes) -> bytes:
    """The line that ends a stream which cannot go on."""
    return ollama_error(body) + b"\n"


def in_error_format(path: str, status: int, body: bytes, request_id: str | None) -> bytes:
    """OpenAI's error body, as a caller of `path` expects it."""
    if not body:
        return body  # the client is gone
    if is_anthropic(path):
        return anthropic_error(body, status, request_id)
    return ollama_error(body) if is_ollama(path) else body


def _error_of(body: bytes) -> dict[str, Any]:
    return fields_of(fields_of(orjson.loads(body)).get("error"))


class ErrorFormatMiddleware:
    """Rewrites error answers on the paths of other APIs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and (is_anthropic(path) or is_ollama(path)):
            send = _Rewriter(path, send).send
        await self._app(scope, receive, send)


class _Rewriter:
    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._start: Message | None = None  # of an error, held back until its body is known
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "x-request-id" in headers and is_anthropic(self._path):
                headers["request-id"] = headers["x-request-id"]  # as Anthropic's clients read it
            # A refused CORS preflight is plain text, for a browser.
            if message["status"] >= 400 and headers.get("content-type") == "application/json":
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            headers = MutableHeaders(scope=self._start)
            request_id = headers.get("x-request-id")
            body = in_error_format(self._path, self._start["status"], self._body, request_id)
            headers["content-length"] = str(len(body))
            await self._send(self._start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)
