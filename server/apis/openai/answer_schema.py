"""JSON Schemas of the answers of chat completions, completions and embeddings (/openapi.json)."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    ERROR,
    NUMBER,
    TEXT,
    Schema,
    any_of,
    json_text,
    list_of,
    object_of,
    or_null,
    with_optional,
    with_required,
    word,
)

USAGE = object_of(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
    completion_tokens_details=object_of(
        reasoning_tokens=COUNT, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT
    ),
)
FUNCTION_CALL = object_of(
    id=TEXT, type=word("function"), function=object_of(name=TEXT, arguments=TEXT)
)
CUSTOM_CALL = object_of(id=TEXT, type=word("custom"), custom=object_of(name=TEXT, input=TEXT))
MESSAGE = with_optional(
    object_of(role=word("assistant"), content=or_null(TEXT), refusal={"type": "null"}),
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=list_of({"anyOf": [FUNCTION_CALL, CUSTOM_CALL]}),
)
TIMINGS = object_of(
    queue_seconds=or_null(NUMBER),
    prefill_seconds=or_null(NUMBER),
    decode_seconds=or_null(NUMBER),
    total_seconds=or_null(NUMBER),
    prompt_tokens=COUNT,
    cached_tokens=COUNT,
    completion_tokens=COUNT,
    preemptions=or_null(COUNT),
    mean_batch_size=or_null(NUMBER),
)
# The caller's stop string or stop token that ended the answer.
STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
CHAT_CHOICE = with_optional(
    object_of(
        index=COUNT,
        message=MESSAGE,
        logprobs=or_null(object_of(content=list_of(ANY_OBJECT), refusal={"type": "null"})),
        finish_reason=word("stop", "length", "tool_calls"),
        stop_reason=STOP_REASON,
    ),
    token_ids=list_of(COUNT),
    timings=TIMINGS,
)
TEXT_CHOICE = with_optional(
    object_of(
        index=COUNT,
        text=TEXT,
        logprobs=or_null(
            object_of(
                tokens=list_of(TEXT),
                token_logprobs=list_of(or_null(NUMBER)),
                top_logprobs=list_of(or_null(ANY_OBJECT)),
                text_offset=list_of(COUNT),
            )
        ),
        finish_reason=word("stop", "length"),
        stop_reason=STOP_REASON,
    ),
    token_ids=list_of(COUNT),
    prompt_token_ids=list_of(COUNT),
    prompt_logprobs=list_of(or_null(ANY_OBJECT)),
    timings=TIMINGS,
)
CHAT = with_optional(
    object_of(
        id=TEXT,
        object=word("chat.completion"),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=list_of(CHAT_CHOICE),
        usage=USAGE,
    ),
    prompt_logprobs=or_null(list_of(or_null(ANY_OBJECT))),
    prompt_token_ids=list_of(COUNT),
    service_tier=word("default"),
)
METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
STORED_CHAT = with_required(CHAT, metadata=METADATA)
STORED_MESSAGE = object_of(
    id=TEXT, role=TEXT, content=or_null(TEXT), content_parts=or_null(list_of(ANY_OBJECT))
)
COMPLETION = object_of(
    id=TEXT,
    object=word("text_completion"),
    created=COUNT,
    model=TEXT,
    system_fingerprint=TEXT,
    choices=list_of(TEXT_CHOICE),
    usage=USAGE,
)


def choice_of_chunk(choice: Schema, **fields: Schema) -> Schema:
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
    chunk_of("chat.completion.chunk", choice_of_chunk(CHAT_CHOICE, delta=DELTA)),
    service_tier=word("default"),
)
TEXT_CHUNK = chunk_of("text_completion", choice_of_chunk(TEXT_CHOICE, text=TEXT))


def openai_events(chunk: Schema) -> Schema:
    """One event of a stream of these chunks: a chunk, an error or the end."""
    return object_of(data=any_of({"const": "[DONE]"}, json_text(any_of(chunk, ERROR))))


CHAT_EVENT = openai_events(CHAT_CHUNK)
COMPLETION_EVENT = openai_events(TEXT_CHUNK)

EMBEDDINGS_USAGE = object_of(
    prompt_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
)
EMBEDDINGS = object_of(
    object=word("list"),
    data=list_of(
        object_of(
            object=word("embedding"),
            index=COUNT,
            embedding={"anyOf": [list_of(NUMBER), TEXT]},
        )
    ),
    model=TEXT,
    usage=EMBEDDINGS_USAGE,
)
SCORES = object_of(
    id=TEXT,
    object=word("list"),
    created=COUNT,
    model=TEXT,
    data=list_of(
        object_of(
            index=COUNT,
            object=word("score"),
            score={"type": "number", "minimum": -1, "maximum": 1},
        )
    ),
    usage=EMBEDDINGS_USAGE,
)
RANKING = object_of(
    id=TEXT,
    model=TEXT,
    results=list_of(
        with_optional(
            object_of(
                index=COUNT,
                relevance_score={"type": "number", "minimum": -1, "maximum": 1},
            ),
            document=object_of(text=TEXT),
        )
    ),
    usage=EMBEDDINGS_USAGE,
)
