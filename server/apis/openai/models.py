"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.http.endpoints import Endpoints
from server.http.openapi_parts import COUNT, TEXT, list_of, object_of, or_null, word
from server.http.query import NoQuery, parse_query
from server.http.validation import Body
from server.state import ServerState, state_of

endpoints = Endpoints("models, tokens, requests")
MODEL = object_of(
    id=TEXT,
    object=word("model"),
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    parent={"type": "null"},
    max_model_len=or_null(COUNT),
    images=or_null(
        object_of(max_images=COUNT, max_pixels=COUNT, max_tokens=COUNT, media_types=list_of(TEXT))
    ),
)


class ModelsQuery(Body):
    """Anthropic's, whose clients share this route."""

    after_id: str | None = None
    limit: int = Field(1000, ge=1, le=1000)


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
        "images": None if state.vision is None else state.vision.description(),
    }


@endpoints.get(
    "/v1/models",
    summary="List the served models",
    head=True,
    query=ModelsQuery,
    answer=object_of(object=word("list"), data=list_of(MODEL)),
)
async def list_models(request: Request) -> Response:
    query = parse_query(ModelsQuery, request.query_params)
    state = state_of(request)
    names = list(state.config.served_names)
    if query.after_id is not None:
        state.check_model(query.after_id)
        names = names[names.index(query.after_id) + 1 :]
    page = names[: query.limit]
    answer: dict[str, Any] = {"object": "list", "data": [_model(state, name) for name in page]}
    if query.model_fields_set:
        answer["has_more"] = len(page) < len(names)
        answer["first_id"], answer["last_id"] = (page[0], page[-1]) if page else (None, None)
    return JSONResponse(answer)


@endpoints.get("/v1/models/{name:path}", summary="Describe one model", head=True, answer=MODEL)
async def get_model(request: Request, name: str) -> Response:
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    state.check_model(name)
    return JSONResponse(_model(state, name))
