"""What streams are made of: events of text/event-stream, lines of application/x-ndjson.

A schema here is one of them.  The document has it as `itemSchema`, OpenAPI 3.2's word for that.
"""

from __future__ import annotations

from server.apis.openai.openapi_texts import CHAT_CHOICE, CUSTOM_CALL, TEXT_CHOICE, USAGE
from server.apis.openapi_adapters import ANTHROPIC_MESSAGE, OLLAMA_HEAD
from server.apis.responses.openapi import ITEM, RESPONSE
from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    TEXT,
    Answers,
    Schema,
    list_of,
    object_of,
    or_null,
    with_optional,
    with_required,
    word,
)

DONE: Schema = {"const": "[DONE]"}
FAILURE = object_of(
    error=object_of(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT))
)


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def told(schema: Schema) -> Schema:
    """A text that is JSON."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def parts_of(choice: Schema, **fields: Schema) -> Schema:
    """A choice of a chunk, for that of a whole answer; `fields` are those that differ."""
    shown = {**choice["properties"], **fields}
    shown.pop("message", None)
    shown["finish_reason"] = or_null(shown["finish_reason"])
    required = ["index", *fields, "finish_reason"]
    return {"type": "object", "properties": shown, "required": required}


def chunk_of(kind: str, choice: Schema) -> Schema:
    whole = object_of(
        id=TEXT,
        object=word(kind),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=list_of(choice),
    )
    return with_optional(whole, usage=or_null(USAGE))


CALL_PART = with_optional(
    object_of(index=COUNT), id=TEXT, type=TEXT, function=object_of(arguments=TEXT)
)
DELTA = with_optional(
    object_of(),
    role=word("assistant"),
    content=or_null(TEXT),
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=list_of(any_of(CALL_PART, CUSTOM_CALL)),
)
CHAT_CHUNK = with_optional(
    chunk_of("chat.completion.chunk", parts_of(CHAT_CHOICE, delta=DELTA)),
    service_tier=word("default"),
)
TEXT_CHUNK = chunk_of("text_completion", parts_of(TEXT_CHOICE, text=TEXT))


def openai_events(chunk: Schema) -> Schema:
    return object_of(data=any_of(DONE, told(any_of(chunk, FAILURE))))


def events(*kinds: tuple[tuple[str, ...], Schema]) -> Schema:
    """Events that say their type twice, each with its own fields."""
    return any_of(
        *(
            object_of(event=word(*names), data=told(with_required(fields, type=word(*names))))
            for names, fields in kinds
        )
    )


NUMBERED = object_of(sequence_number=COUNT)
OF_ITEM = with_required(NUMBERED, output_index=COUNT)
OF_PART = with_required(OF_ITEM, item_id=TEXT)
STATES = ("created", "queued", "in_progress", "completed", "incomplete", "failed")
RESPONSE_EVENTS = events(
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
OF_BLOCK = object_of(index=COUNT)
BEGUN = with_optional(ANTHROPIC_MESSAGE, stop_reason={"type": "null"})
ANTHROPIC_EVENTS = events(
    (("message_start",), object_of(message=BEGUN)),
    (("content_block_start",), with_required(OF_BLOCK, content_block=object_of(type=TEXT))),
    (("content_block_delta",), with_required(OF_BLOCK, delta=object_of(type=TEXT))),
    (("content_block_stop",), OF_BLOCK),
    (("message_delta",), object_of(delta=object_of(stop_reason=TEXT), usage=ANY_OBJECT)),
    (("message_stop", "ping"), object_of()),
    (("error",), object_of(error=object_of(type=TEXT, message=TEXT))),
)
OLLAMA_FAILURE = object_of(error=TEXT)
OLLAMA_MESSAGE = object_of(role=word("assistant"), content=TEXT)
STREAMS: Answers = {
    ("post", "/v1/chat/completions"): openai_events(CHAT_CHUNK),
    ("post", "/v1/completions"): openai_events(TEXT_CHUNK),
    ("post", "/v1/responses"): RESPONSE_EVENTS,
    ("get", "/v1/responses/{id}"): RESPONSE_EVENTS,
    ("post", "/v1/messages"): ANTHROPIC_EVENTS,
    ("post", "/api/chat"): any_of(object_of(**OLLAMA_HEAD, message=OLLAMA_MESSAGE), OLLAMA_FAILURE),
    ("post", "/api/generate"): any_of(object_of(**OLLAMA_HEAD, response=TEXT), OLLAMA_FAILURE),
}
