"""Whose request it is, and its id: what the middleware notes in the `state` of an HTTP request.

Batches note the same for their lines.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from starlette.requests import Request

OWNER = "owner"  # SHA-256 of the request's key, if it needed one
KEY_NAME = "key_name"  # that operators know the key by
REQUEST_ID = "request_id"  # what X-Request-Id of the answer says
GENERATION = "generation"  # what is generated for it; see server.telemetry.summary
ERROR_CODE = "error_code"  # of the error that it ended with; its type if that has no code
RECEIVE = "receive"  # of ASGI: tells that the client has gone, once the body is read
CLIENT_GONE = "client_gone"  # True if the client closed the connection before the end
REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

# That of the request which this task answers; {} outside of one.
exchange: ContextVar[dict[str, Any]] = ContextVar("exchange")
# Images that this task has read, while it may count its prompt several times; None otherwise.
images_read: ContextVar[dict[Any, Any] | None] = ContextVar("images_read", default=None)


def id_for(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The caller's own X-Request-Id if it has this pattern, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID_PATTERN.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()


def note_error(code: str) -> None:
    """With what the HTTP request ends that this task answers."""
    exchange.get({})[ERROR_CODE] = code


def owner_of(request: Request) -> bytes:
    """Whose things a request may see: the SHA-256 of its key; b"" if it needs none."""
    return request.scope.get("state", {}).get(OWNER, b"")


def current_owner() -> bytes:
    """The owner of the request that this task answers."""
    return exchange.get({}).get(OWNER, b"")


def prefix_salt(request: Request, cache_salt: str | None) -> bytes:
    """Prefixes are shared between requests of one salt: of one key and of one `cache_salt`.

    Digests have one length, so no `cache_salt` can imitate another key's.
    """
    return owner_of(request) + (cache_salt or "").encode()
