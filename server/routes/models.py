"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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


@router.get("/v1/models", summary="List the served models", response_model=None)
async def list_models(request: Request) -> Response:
    state = state_of(request)
    models = [_model(state, name) for name in state.config.served_names]
    return JSONResponse({"object": "list", "data": models})


@router.get("/v1/models/{name:path}", summary="Describe one model", response_model=None)
async def get_model(request: Request, name: str) -> Response:
    state = state_of(request)
    state.check_model(name)
    return JSONResponse(_model(state, name))
