"""GET /v1/requests/{id}: what became of a request, and what it waited for."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import NotFound
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_digest
from server.state import state_of

router = APIRouter()


@router.get("/v1/requests/{name}", summary="Explain a request", response_model=None)
async def get_request(request: Request, name: str) -> Response:
    """By X-Request-Id or by the answer's id, while it runs and for a while afterwards."""
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    key = owner_digest(request)
    found = state.requests.find(name, key) or state.batch_requests.find(name, key)
    if found is None:
        limit = state.requests.limit
        shared = (
            "" if state.config.api_workers == 1 else ", by the one process of several that got them"
        )
        raise NotFound(
            f"no request `{name[:128]}` is known: the last {limit} are remembered{shared} "
            "(--request-history)",
            code="request_not_found",
        )
    return JSONResponse(found)
