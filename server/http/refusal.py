"""An error that is answered before any route is asked."""

from __future__ import annotations

from starlette.types import Send

from server.errors import INVALID_REQUEST, RATE_LIMIT, SERVER_ERROR, error_body

Headers = list[tuple[bytes, bytes]]
CLOSE: Headers = [(b"connection", b"close")]


async def refuse(send: Send, status: int, message: str, code: str | None, headers: Headers) -> None:
    """Answer with OpenAI's error body instead of a route's answer."""
    kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
    if status == 429:
        kind = RATE_LIMIT
    await send_error(send, status, error_body(message, kind, None, code), headers)


async def send_error(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Answer with this body, which is JSON."""
    fields: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
