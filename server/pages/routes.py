"""The playground at `/`, and its static files below `/pages/`.

They need no API key: a page is the same for all, and asks for a key before it asks for answers.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from server.http.endpoints import Endpoints
from server.http.openapi_parts import TEXT
from server.http.root_path import ONLY_PREFIX
from server.pages.assets import send_asset

endpoints = Endpoints("operation")
NOT_WANTED = re.compile(r"q=0(\.0*)?")
# What a model writes can neither run nor load anything: no script but our files, no other host,
# and no text that is parsed as HTML (trusted types).
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept, accept-encoding",
}


@endpoints.get(
    "/", summary="That a server is here", head=True, answer=TEXT, media_type="text/plain"
)
async def root(request: Request) -> Response:
    """What Ollama's command and many monitors ask first; a browser gets the playground."""
    if wants_html(request.headers.get("accept", "")):
        prefix: str | None = request.scope.get(ONLY_PREFIX)
        if prefix is not None:  # the addresses in the page are relative to the slash
            return RedirectResponse(f"{prefix}/", headers={"vary": "accept"})
        return await send_asset(request, "playground/index.html", PAGE_HEADERS)
    return PlainTextResponse("Wavefill is running: see /docs\n", headers={"vary": "accept"})


@endpoints.undocumented("/pages/{name:path}")
async def page_file(request: Request, name: str) -> Response:
    return await send_asset(request, name, {"content-security-policy": POLICY})


def wants_html(accept: str) -> bool:
    """Whether `Accept` names text/html, as browsers do; `*/*` does not."""
    for entry in accept.lower().split(","):
        kind, *options = [part.strip() for part in entry.split(";")]
        if kind == "text/html":
            return not any(NOT_WANTED.fullmatch(option) for option in options)
    return False
