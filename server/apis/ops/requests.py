"""GET /v1/requests/{id}: what became of a request, and what it waited for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import NotFound
from server.http.endpoints import Endpoints
from server.http.openapi_parts import ANY_OBJECT, NUMBER, TEXT, object_of, word
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of
from server.state import state_of

endpoints = Endpoints("models, tokens, requests")
REQUEST = object_of(
    id=TEXT,
    object=word("request"),
    request_id=TEXT,
    route=TEXT,
    model=TEXT,
    created=NUMBER,
    state=word("queued", "running", "finished", "failed", "aborted"),
    usage=ANY_OBJECT,
)


@endpoints.get("/v1/requests/{name}", summary="Explain a request", answer=REQUEST)
async def get_request(request: Request, name: str) -> Response:
    """By X-Request-Id or by the answer's id, while it runs and for a while afterwards."""
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    owner = owner_of(request)
    found = state.requests.find(name, owner) or state.batch_requests.find(name, owner)
    if found is None:
        limit = state.requests.limit
        shared = (
            "" if state.config.api_workers == 1 else ", by the one process of several that got them"
        )
        raise NotFound(
            "no request `{}` is known: the last {} are remembered{} (--request-history)",
            (name[:128], limit, shared),
            code="request_not_found",
        )
    return JSONResponse(found)
