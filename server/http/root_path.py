"""--root-path: the path prefix under which a proxy serves this server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

ONLY_PREFIX = "wavefill.only_prefix"  # in the scope of a request for the prefix itself: the prefix


class RootPathMiddleware:
    """Removes the prefix from the paths of requests that have it.

    Those of a proxy that strips it, and of probes, come without it and are taken as they are.  It
    stands before all other middleware, which decide by the path.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._prefix = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            raw, path = self._prefix.encode(), scope["path"].removeprefix(self._prefix)
            scope = {
                **scope,
                **({} if path else {ONLY_PREFIX: self._prefix}),
                "path": path or "/",
                "raw_path": scope["raw_path"].removeprefix(raw) or b"/",
            }
        await self._app(scope, receive, send)
