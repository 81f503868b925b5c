"""/v1/batches: many requests in a file, answered while no other request needs the engine."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.apis.responses.answer_schema import ITEMS_USAGE
from server.batches.background import ENDPOINTS
from server.batches.file_routes import store_of
from server.batches.objects import BatchObject
from server.batches.schema import BatchQuery, BatchRequest
from server.errors import RequestError
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import COUNT, TEXT, list_of, object_of, or_null, page_schema, word
from server.http.pagination import listed
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of
from server.http.validation import parse
from server.state import state_of

endpoints = Endpoints("files and batches")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH = object_of(
    id=TEXT,
    object=word("batch"),
    endpoint=TEXT,
    model=or_null(TEXT),
    errors=or_null(
        object_of(object=word("list"), data=list_of(object_of(code=TEXT, message=TEXT)))
    ),
    input_file_id=TEXT,
    completion_window=TEXT,
    status=word("validating", *TIMES),
    output_file_id=or_null(TEXT),
    error_file_id=or_null(TEXT),
    created_at=COUNT,
    expires_at=COUNT,
    **{f"{name}_at": or_null(COUNT) for name in TIMES},
    request_counts=object_of(total=COUNT, completed=COUNT, failed=COUNT),
    usage=ITEMS_USAGE,
    metadata=or_null({"type": "object", "additionalProperties": TEXT}),
)


def _shown(batch: BatchObject) -> Response:
    return JsonBody(msgspec.json.encode(batch))


@endpoints.post(
    "/v1/batches",
    summary="Run the requests of a file",
    body=BatchRequest,
    example={
        "input_file_id": "file-...",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    answer=BATCH,
)
async def create_batch(request: Request) -> Response:
    store = store_of(state_of(request))
    wanted = await read_checked(request, lambda fields: parse(BatchRequest, fields))
    if wanted.endpoint not in ENDPOINTS:
        raise RequestError(
            f"`endpoint` is {wanted.endpoint!r}: it must be one of {', '.join(ENDPOINTS)}",
            param="endpoint",
        )
    return _shown(await asyncio.to_thread(store.create, owner_of(request), wanted))


@endpoints.get("/v1/batches", summary="List batches", query=BatchQuery, answer=page_schema(BATCH))
async def list_batches(request: Request) -> Response:
    query = parse_query(BatchQuery, request.query_params)
    store = store_of(state_of(request))
    page, more = await asyncio.to_thread(
        store.page, owner_of(request), after=query.after, limit=query.limit
    )
    whole = listed(page, [batch.id for batch in page], has_more=more)
    return JsonBody(msgspec.json.encode(whole))


@endpoints.get("/v1/batches/{batch_id}", summary="Describe a batch", answer=BATCH)
async def get_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    store = store_of(state_of(request))
    return _shown(await asyncio.to_thread(store.find, owner_of(request), batch_id))


@endpoints.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", answer=BATCH)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    store = store_of(state_of(request))
    return _shown(await asyncio.to_thread(store.cancel, owner_of(request), batch_id))
