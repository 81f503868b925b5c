"""/v1/files: uploads and what batches wrote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from server.batches.files import StoredFile
from server.batches.multipart import boundary_of
from server.batches.schema import FileQuery
from server.batches.store import BatchStore
from server.batches.upload import receive_upload
from server.errors import NotFound
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody
from server.http.openapi_parts import (
    COUNT,
    TEXT,
    Schema,
    deleted,
    object_of,
    or_null,
    page_schema,
    word,
)
from server.http.pagination import listed
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of
from server.state import ServerState, state_of

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


def store_of(state: ServerState) -> BatchStore:
    """Raises NotFound where files and batches are not switched on."""
    if state.batches is None:
        raise NotFound(
            "files and batches are off: the operator can switch them on with --data-dir DIRECTORY",
            code="not_enabled",
        )
    return state.batches


@endpoints.post("/v1/files", summary="Upload a file", form=UPLOAD, answer=FILE)
async def upload_file(request: Request) -> Response:
    state = state_of(request)
    store = store_of(state)
    boundary = boundary_of(request.headers.get("content-type", ""))
    length = request.headers.get("content-length", "")
    file = await receive_upload(
        store.files,
        owner_of(request),
        boundary,
        request.stream(),
        num_bytes=int(length) if length.isdigit() else None,
        max_bytes=state.config.max_file_bytes,
    )
    return JSONResponse(file.to_json())


@endpoints.get("/v1/files", summary="List files", query=FileQuery, answer=page_schema(FILE))
async def list_files(request: Request) -> Response:
    query = parse_query(FileQuery, request.query_params)
    files = store_of(state_of(request)).files

    def work() -> bytes:
        page, more = files.page(
            owner_of(request),
            after=query.after,
            limit=query.limit,
            ascending=query.order == "asc",
            purpose=query.purpose,
        )
        to_json = [file.to_json() for file in page]
        return orjson.dumps(listed(to_json, [file.id for file in page], has_more=more))

    return JsonBody(await asyncio.to_thread(work))


async def _file(request: Request, file_id: str) -> StoredFile:
    files = store_of(state_of(request)).files
    return await asyncio.to_thread(files.find, owner_of(request), file_id)


@endpoints.get("/v1/files/{file_id}", summary="Describe a file", answer=FILE)
async def get_file(request: Request, file_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    return JSONResponse((await _file(request, file_id)).to_json())


@endpoints.delete("/v1/files/{file_id}", summary="Delete a file", answer=deleted("file"))
async def delete_file(request: Request, file_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    files = store_of(state_of(request)).files
    await asyncio.to_thread(files.delete, owner_of(request), file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@endpoints.get(
    "/v1/files/{file_id}/content",
    summary="A file's content",
    answer=TEXT,
    media_type="application/octet-stream",
)
async def file_content(request: Request, file_id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    file = await _file(request, file_id)
    path = store_of(state_of(request)).files.path(file.id)
    try:
        source = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:  # deleted since
        raise NotFound(f"the file `{file.id}` is gone", code="file_not_found") from None
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_pieces(source), 200, headers, "application/octet-stream")


async def _pieces(source: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield piece
    finally:
        source.close()
