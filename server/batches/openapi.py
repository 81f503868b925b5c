"""Answers about files and batches."""

from __future__ import annotations

from server.apis.responses.openapi import ITEMS_USAGE
from server.http.openapi_parts import (
    COUNT,
    TEXT,
    Answers,
    deleted,
    list_of,
    object_of,
    or_null,
    page_of,
    word,
)

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
ANSWERS: Answers = {
    ("post", "/v1/files"): FILE,
    ("get", "/v1/files"): page_of(FILE),
    ("get", "/v1/files/{file_id}"): FILE,
    ("delete", "/v1/files/{file_id}"): deleted("file"),
    ("post", "/v1/batches"): BATCH,
    ("get", "/v1/batches"): page_of(BATCH),
    ("get", "/v1/batches/{batch_id}"): BATCH,
    ("post", "/v1/batches/{batch_id}/cancel"): BATCH,
}
