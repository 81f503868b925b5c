"""/v1/files and /v1/batches: many requests in a file, answered while no other needs the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.apis.responses.answer_schema import ITEMS_USAGE
from server.batches.background import ENDPOINTS
from server.batches.database import in_thread
from server.batches.files import StoredFile
from server.batches.schema import BatchQuery, BatchRequest, FileQuery
from server.batches.store import BatchStore
from server.batches.upload import receive_upload
from server.errors import NotFound, RequestError
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import (
    COUNT,
    TEXT,
    Schema,
    deleted,
    list_of,
    object_of,
    or_null,
    page_schema,
    word,
)
from server.http.pagination import listed
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of
from server.http.validation import parse
from server.state import state_of

endpoints = Endpoints("files and batches")
FILE = object_of(
    id=TEXT,
    object=word("file"),
    bytes=COUNT,
    created_at=COUNT,
    expires_at=or_null(COUNT),
    filename=TEXT,
    purpose=TEXT,
    status=word("processed"),
    status_details={"type": "null"},
)
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
CHUNK_BYTES = 256 << 10
UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": TEXT,
        "expires_after[anchor]": TEXT,
        "expires_after[seconds]": {"type": "integer"},
    },
}


def store_of(request: Request) -> BatchStore:
    """Raises NotFound where files and batches are not switched on."""
    store = state_of(request).batches
    if store is None:
        raise NotFound(
            "files and batches are off: the operator can switch them on with --data-dir DIRECTORY",
            code="not_enabled",
        )
    return store


def _json(fields: object) -> Response:
    return JsonBody(msgspec.json.encode(fields))


@endpoints.post("/v1/files", summary="Upload a file", form=UPLOAD, answer=FILE)
async def upload_file(request: Request) -> Response:
    files = store_of(request).files
    return _json(await receive_upload(request, files, state_of(request).config.max_file_bytes))


@endpoints.get("/v1/files", summary="List files", query=FileQuery, answer=page_schema(FILE))
async def list_files(request: Request) -> Response:
    query = parse_query(FileQuery, request.query_params)
    files = store_of(request).files

    def work() -> bytes:
        page, more = files.page(owner_of(request), query)
        return msgspec.json.encode(listed(page, [file.id for file in page], has_more=more))

    return JsonBody(await in_thread(work))


async def _file(request: Request, file_id: str) -> StoredFile:
    parse_query(NoQuery, request.query_params)
    return await in_thread(store_of(request).files.find, owner_of(request), file_id)


@endpoints.get("/v1/files/{file_id}", summary="Describe a file", answer=FILE)
async def get_file(request: Request, file_id: str) -> Response:
    return _json(await _file(request, file_id))


@endpoints.delete("/v1/files/{file_id}", summary="Delete a file", answer=deleted("file"))
async def delete_file(request: Request, file_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    await in_thread(store_of(request).files.delete, owner_of(request), file_id)
    return _json({"id": file_id, "object": "file", "deleted": True})


@endpoints.get(
    "/v1/files/{file_id}/content",
    summary="A file's content",
    answer=TEXT,
    media_type="application/octet-stream",
)
async def file_content(request: Request, file_id: str) -> Response:
    file = await _file(request, file_id)
    path = store_of(request).files.path(file.id)
    try:
        source = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:  # deleted since
        raise NotFound("the file `{}` is gone", file.id, code="file_not_found") from None
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_chunks(source), 200, headers, "application/octet-stream")


async def _chunks(source: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield chunk
    finally:
        source.close()


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
    store = store_of(request)
    body = await read_checked(request, lambda fields: parse(BatchRequest, fields))
    if body.endpoint not in ENDPOINTS:
        raise RequestError(
            "{endpoint} is {!r}: it must be one of {}", (body.endpoint, ", ".join(ENDPOINTS))
        )
    return _json(await in_thread(store.create, owner_of(request), body))


@endpoints.get("/v1/batches", summary="List batches", query=BatchQuery, answer=page_schema(BATCH))
async def list_batches(request: Request) -> Response:
    query = parse_query(BatchQuery, request.query_params)
    page, more = await in_thread(store_of(request).page, owner_of(request), query)
    return _json(listed(page, [batch.id for batch in page], has_more=more))


@endpoints.get("/v1/batches/{batch_id}", summary="Describe a batch", answer=BATCH)
async def get_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    return _json(await in_thread(store_of(request).find, owner_of(request), batch_id))


@endpoints.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", answer=BATCH)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    return _json(await in_thread(store_of(request).cancel, owner_of(request), batch_id))
