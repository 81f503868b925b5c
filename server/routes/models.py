"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.routes.get_or_head import get_or_head
from server.schema.query import NoQuery, parse_query
from server.state import ServerState, state_of

router = APIRouter()


def _model(state: ServerState, name: str) -> dict[str, Any]:
    ready = state.client.ready
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "wavefill",
        "root": state.config.served_names[0],
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
    }


@get_or_head(router, "/v1/models", summary="List the served models")
async def list_models(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    models = [_model(state, name) for name in state.config.served_names]
    return JSONResponse({"object": "list", "data": models})


@get_or_head(router, "/v1/models/{name:path}", summary="Describe one model")
async def get_model(request: Request, name: str) -> Response:
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    state.check_model(name)
    return JSONResponse(_model(state, name))
