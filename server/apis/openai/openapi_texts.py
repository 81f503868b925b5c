"""Answers of chat completions and completions, stored ones too."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    NUMBER,
    TEXT,
    Answers,
    Schema,
    deleted,
    list_of,
    object_of,
    or_null,
    page_of,
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
ANSWERS: Answers = {
    ("post", "/v1/chat/completions"): CHAT,
    ("get", "/v1/chat/completions"): page_of(STORED_CHAT),
    ("get", "/v1/chat/completions/{id}"): STORED_CHAT,
    ("post", "/v1/chat/completions/{id}"): STORED_CHAT,
    ("delete", "/v1/chat/completions/{id}"): deleted("chat.completion.deleted"),
    ("get", "/v1/chat/completions/{id}/messages"): page_of(
        object_of(
            id=TEXT, role=TEXT, content=or_null(TEXT), content_parts=or_null(list_of(ANY_OBJECT))
        )
    ),
    ("post", "/v1/completions"): object_of(
        id=TEXT,
        object=word("text_completion"),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=list_of(TEXT_CHOICE),
        usage=USAGE,
    ),
}
