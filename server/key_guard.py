"""The API key: every path but a few public ones is closed without it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.exchange import OWNER
from server.refusal import refuse

PUBLIC_PATHS = frozenset({"/health", "/livez", "/readyz", "/ready", "/ping"})


class KeyGuard:
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
        digest = self._known_digest(scope)
        if digest is not None:
            scope.setdefault("state", {})[OWNER] = digest
            await self._app(scope, receive, send)
            return
        message = (
            "Incorrect API key provided: send `Authorization: Bearer KEY` with a key of this server"
        )
        await refuse(send, 401, message, "invalid_api_key", [(b"www-authenticate", b"Bearer")])

    def _known_digest(self, scope: Scope) -> bytes | None:
        """The SHA-256 of the request's key; None unless the key is one of ours."""
        key = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:].strip()
            elif name == b"x-api-key":
                key = value.strip()
        digest = hashlib.sha256(key).digest()
        # All keys are compared, so that the time tells nothing about any of them.
        known = any([hmac.compare_digest(digest, known) for known in self._digests])
        return digest if known else None
