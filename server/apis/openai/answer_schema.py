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
EMBEDDINGS_USAGE = object_of(
    prompt_tokens=COUNT, total_tokens=COUNT, prompt_tokens_details=object_of(cached_tokens=COUNT)
)
FUNCTION_CALL = object_of(
    id=TEXT, type=word("function"), function=object_of(name=TEXT, arguments=TEXT)
)
CUSTOM_CALL = object_of(id=TEXT, type=word("custom"), custom=object_of(name=TEXT, input=TEXT))
MESSAGE = with_optional(
    object_of(role=word("assistant"), content=or_null(TEXT), refusal={"type": "null"}),
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=list_of(any_of(FUNCTION_CALL, CUSTOM_CALL)),
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


def _completion(kind: str, choice: Schema) -> Schema:
    """Without `usage`, which a chunk may lack."""
    return object_of(
        id=TEXT,
        object=word(kind),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=list_of(choice),
    )


CHAT = with_optional(
    with_required(_completion("chat.completion", CHAT_CHOICE), usage=USAGE),
    prompt_logprobs=or_null(list_of(or_null(ANY_OBJECT))),
    prompt_token_ids=list_of(COUNT),
    service_tier=word("default"),
)
METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
STORED_CHAT = with_required(CHAT, metadata=METADATA)
STORED_MESSAGE = object_of(
    id=TEXT, role=TEXT, content=or_null(TEXT), content_parts=or_null(list_of(ANY_OBJECT))
)
COMPLETION = with_required(_completion("text_completion", TEXT_CHOICE), usage=USAGE)


def _chunk(kind: str, choice: Schema, **delta: Schema) -> Schema:
    """choice: of the whole completion; delta: the field of a chunk's choice in place of its text"""
    properties = {**choice["properties"], **delta}
    properties.pop("message", None)
    properties["finish_reason"] = or_null(properties["finish_reason"])
    required = ["index", *delta, "finish_reason"]
    choice = {"type": "object", "properties": properties, "required": required}
    return with_optional(_completion(kind, choice), usage=or_null(USAGE))


CALL_DELTA = with_optional(
    object_of(index=COUNT), id=TEXT, type=TEXT, function=object_of(arguments=TEXT)
)
DELTA = with_optional(
    object_of(),
    role=word("assistant"),
    content=or_null(TEXT),
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=list_of(any_of(CALL_DELTA, CUSTOM_CALL)),
)


def _event(chunk: Schema) -> Schema:
    """One event of a stream: a chunk, an error or the end."""
    return object_of(data=any_of({"const": "[DONE]"}, json_text(any_of(chunk, ERROR))))


CHAT_EVENT = _event(
    with_optional(
        _chunk("chat.completion.chunk", CHAT_CHOICE, delta=DELTA), service_tier=word("default")
    )
)
COMPLETION_EVENT = _event(_chunk("text_completion", TEXT_CHOICE, text=TEXT))

EMBEDDINGS = object_of(
    object=word("list"),
    data=list_of(
        object_of(object=word("embedding"), index=COUNT, embedding=any_of(list_of(NUMBER), TEXT))
    ),
    model=TEXT,
    usage=EMBEDDINGS_USAGE,
)
COSINE: Schema = {"type": "number", "minimum": -1, "maximum": 1}
SCORES = object_of(
    id=TEXT,
    object=word("list"),
    created=COUNT,
    model=TEXT,
    data=list_of(object_of(index=COUNT, object=word("score"), score=COSINE)),
    usage=EMBEDDINGS_USAGE,
)
RANKING = object_of(
    id=TEXT,
    model=TEXT,
    results=list_of(
        with_optional(object_of(index=COUNT, relevance_score=COSINE), document=object_of(text=TEXT))
    ),
    usage=EMBEDDINGS_USAGE,
)
