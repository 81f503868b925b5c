"""Which paths are treated otherwise than those of the APIs."""

from __future__ import annotations

PROBES = frozenset({"/health", "/livez", "/readyz", "/ready", "/ping"})
# The documentation and the pages hold nothing of users.  A browser sends no key for a page, so
# they have to load without one; they ask for the key of the requests that are made in them.
PAGES = frozenset({"/", "/dashboard", "/docs", "/openapi.json"})
PAGE_FILES = ("/pages/", "/static/")
# Answered whatever the load, and while draining.
WATCHING_PATHS = PROBES | {"/metrics", "/v1/loads"}


def needs_no_key(path: str) -> bool:
    """The one rule of routes without an API key."""
    return path in PROBES or path in PAGES or path.startswith(PAGE_FILES)


def is_routine(path: str) -> bool:
    """Whether monitors ask for it all the time, or browsers for many of its kind at once."""
    return path in WATCHING_PATHS or path in ("/", "/dashboard") or path.startswith(PAGE_FILES)
