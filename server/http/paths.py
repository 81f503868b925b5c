"""Which paths are treated otherwise than those of the APIs, and the prefix of a --root-path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

PROBES = frozenset({"/health", "/livez", "/readyz", "/ready", "/ping"})
# The documentation and the pages hold nothing of users.  A browser sends no key for a page, so
# they have to load without one; they ask for the key of the requests that are made in them.
PAGES = frozenset({"/", "/dashboard", "/docs", "/openapi.json", "/favicon.ico"})
PAGE_FILES = ("/pages/", "/static/")
# Answered whatever the load, and while draining.
WATCHING_PATHS = PROBES | {"/metrics", "/v1/loads"}
ROUTINE = WATCHING_PATHS | {"/", "/dashboard", "/favicon.ico"}
ONLY_PREFIX = "wavefill.only_prefix"  # in the scope of a request for the prefix itself: the prefix


def needs_no_key(path: str) -> bool:
    """The one rule of routes without an API key."""
    return path in PROBES or path in PAGES or path.startswith(PAGE_FILES)


def is_routine(path: str) -> bool:
    """Whether monitors ask for it all the time, or browsers for many of its kind at once."""
    return path in ROUTINE or path.startswith(PAGE_FILES)


class RootPathMiddleware:
    """Removes the prefix under which a proxy serves this server.

    Requests of a proxy that strips it, and of probes, come without it and are taken as they are.
    It stands before all other middleware, which decide by the path.
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
