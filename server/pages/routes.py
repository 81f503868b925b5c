"""The playground at `/`, the dashboard at `/dashboard`, and their static files below `/pages/`.

They need no API key: a page is the same for all, and asks for a key before it asks for answers.
What the dashboard shows does need one (server/dashboard/access.py).
"""

from __future__ import annotations

import re

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from server.dashboard.access import check_may_watch
from server.errors import FieldPath, RequestError
from server.http.endpoints import Endpoints
from server.http.openapi_parts import TEXT
from server.http.paths import ONLY_PREFIX
from server.http.query import parse_query
from server.http.sse import EventStream, EventWriter
from server.http.validation import Body
from server.pages.assets import send_asset
from server.state import state_of

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


@endpoints.undocumented("/dashboard")
async def dashboard(request: Request) -> Response:
    return await send_asset(request, "dashboard/index.html", PAGE_HEADERS)


class EventsQuery(Body):
    """Which engine the page shows."""

    engine: int = Field(0, ge=0, le=63)  # --data-parallel allows so many


@endpoints.undocumented("/dashboard/events")
async def dashboard_events(request: Request) -> Response:
    """What the page shows, once a second; its form is that page's own affair."""
    query = parse_query(EventsQuery, request.query_params)
    check_may_watch(request)
    count = len(state_of(request).client.engines)
    if query.engine >= count:
        raise RequestError(
            "`engine` is {}: this server has {}, numbered from 0",
            (query.engine, count),
            param=FieldPath("engine"),
        )
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    feed, gate = state_of(request).dashboard, request.app.state.drain_state
    subscription = feed.subscribe(query.engine)

    async def produce(writer: EventWriter) -> None:
        while not gate.draining:
            await writer.write(await subscription.next())

    return EventStream(produce, lambda: feed.unsubscribe(subscription))


@endpoints.undocumented("/favicon.ico")
async def favicon(request: Request) -> Response:
    """What browsers ask for beside anything that is no page, such as /v1/models."""
    return await send_asset(request, "playground/icon.svg", {"content-security-policy": POLICY})


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
