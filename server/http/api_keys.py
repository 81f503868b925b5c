"""The API key: every path but a few public ones is closed without it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.refusal import Headers, refuse
from server.http.request_context import OWNER

PUBLIC_PATHS = frozenset({"/health", "/livez", "/readyz", "/ready", "/ping"})
MISSING = "You did not provide an API key"  # in OpenAI's words, as far as they go
INCORRECT = "Incorrect API key provided"
HEADERS = "`Authorization: Bearer KEY` (or `x-api-key: KEY`)"


class ApiKeyMiddleware:
    """401 unless `Authorization: Bearer KEY` (or `x-api-key`) names one of the keys.

    Holders of different keys share no prefix cache: how fast an answer comes would tell one what
    another asked.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = {hashlib.sha256(key.encode()).digest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        key = _key_of(scope["headers"])
        digest = self._known_digest(key)
        if digest is not None:
            scope.setdefault("state", {})[OWNER] = digest
            await self._app(scope, receive, send)
            return
        told, code = (INCORRECT, "invalid_api_key") if key else (MISSING, None)
        message = f"{told}: send a key of this server in the header {HEADERS}"
        await refuse(send, 401, message, code, [(b"www-authenticate", b"Bearer")])

    def _known_digest(self, key: bytes) -> bytes | None:
        """The SHA-256 of a key; None unless it is one of ours."""
        digest = hashlib.sha256(key).digest()
        # All keys are compared, so that the time depends on none of them.
        known = any([hmac.compare_digest(digest, known) for known in self._digests])
        return digest if known else None


def _key_of(headers: Headers) -> bytes:
    """The key that a request sends; b"" if it sends none."""
    key = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            key = value[7:].strip()
        elif name == b"x-api-key":
            key = value.strip()
    return key
