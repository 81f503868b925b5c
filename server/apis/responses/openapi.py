"""Answers of /v1/responses."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Answers,
    deleted,
    list_of,
    object_of,
    or_null,
    page_of,
    word,
)

ITEMS_USAGE = object_of(
    input_tokens=COUNT,
    input_tokens_details=object_of(cached_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=object_of(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
ITEM = object_of(id=TEXT, type=TEXT)
RESPONSE = object_of(
    id=TEXT,
    object=word("response"),
    created_at=COUNT,
    completed_at=or_null(COUNT),
    status=word("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    background=FLAG,
    error=or_null(object_of(code=TEXT, message=TEXT)),
    incomplete_details=or_null(object_of(reason=TEXT)),
    instructions=or_null(TEXT),
    metadata={"type": "object", "additionalProperties": TEXT},
    model=TEXT,
    output=list_of(ITEM),
    parallel_tool_calls=FLAG,
    previous_response_id=or_null(TEXT),
    store=FLAG,
    temperature=NUMBER,
    tools=list_of(ANY_OBJECT),
    top_p=NUMBER,
    usage=or_null(ITEMS_USAGE),
)
ANSWERS: Answers = {
    ("post", "/v1/responses"): RESPONSE,
    ("post", "/v1/responses/input_tokens"): object_of(
        object=word("response.input_tokens"), input_tokens=COUNT
    ),
    ("get", "/v1/responses/{id}"): RESPONSE,
    ("delete", "/v1/responses/{id}"): deleted("response"),
    ("post", "/v1/responses/{id}/cancel"): RESPONSE,
    ("get", "/v1/responses/{id}/input_items"): page_of(ITEM),
}
