"""/v1/batches: many requests in a file, answered while nobody else needs the engine."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.sampling_schema import openapi_body
from server.batches.background import ENDPOINTS
from server.batches.file_routes import store_of
from server.batches.objects import BatchObject
from server.batches.schema import BatchQuery, BatchRequest
from server.errors import RequestError
from server.http.json_body import JsonBody, read_checked
from server.http.pagination import listed
from server.http.query import NoQuery, openapi_query, parse_query
from server.http.request_context import owner_of
from server.http.validation import parse
from server.state import state_of

router = APIRouter()


def _shown(batch: BatchObject) -> Response:
    return JsonBody(msgspec.json.encode(batch))


@router.post(
    "/v1/batches",
    summary="Run the requests of a file",
    response_model=None,
    openapi_extra=openapi_body(BatchRequest),
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


@router.get(
    "/v1/batches",
    summary="List batches",
    response_model=None,
    openapi_extra=openapi_query(BatchQuery),
)
async def list_batches(request: Request) -> Response:
    query = parse_query(BatchQuery, request.query_params)
    store = store_of(state_of(request))
    page, more = await asyncio.to_thread(
        store.page, owner_of(request), after=query.after, limit=query.limit
    )
    whole = listed(page, [batch.id for batch in page], has_more=more)
    return JsonBody(msgspec.json.encode(whole))


@router.get("/v1/batches/{batch_id}", summary="Describe a batch", response_model=None)
async def get_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    store = store_of(state_of(request))
    return _shown(await asyncio.to_thread(store.find, owner_of(request), batch_id))


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", response_model=None)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    store = store_of(state_of(request))
    return _shown(await asyncio.to_thread(store.cancel, owner_of(request), batch_id))
