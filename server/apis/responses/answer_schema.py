"""JSON Schemas of the answers of /v1/responses, for /openapi.json."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    events,
    list_of,
    object_of,
    or_null,
    with_required,
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

NUMBERED = object_of(sequence_number=COUNT)
OF_ITEM = with_required(NUMBERED, output_index=COUNT)
OF_PART = with_required(OF_ITEM, item_id=TEXT)
STATES = ("created", "queued", "in_progress", "completed", "incomplete", "failed")
RESPONSE_EVENT = events(
    (tuple(f"response.{state}" for state in STATES), with_required(NUMBERED, response=RESPONSE)),
    (
        ("response.output_item.added", "response.output_item.done"),
        with_required(OF_ITEM, item=ITEM),
    ),
    (
        ("response.content_part.added", "response.content_part.done"),
        with_required(OF_PART, content_index=COUNT, part=object_of(type=TEXT)),
    ),
    (
        ("response.output_text.delta", "response.reasoning_text.delta"),
        with_required(OF_PART, content_index=COUNT, delta=TEXT),
    ),
    (
        ("response.output_text.done", "response.reasoning_text.done"),
        with_required(OF_PART, content_index=COUNT, text=TEXT),
    ),
    (
        ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"),
        with_required(OF_PART, delta=TEXT),
    ),
    (("response.function_call_arguments.done",), with_required(OF_PART, arguments=TEXT)),
    (("response.custom_tool_call_input.done",), with_required(OF_PART, input=TEXT)),
    (("error",), with_required(NUMBERED, message=TEXT)),
)
