"""What routes answer with, for the OpenAPI document: JSON Schemas, held to the answers by tests.

Objects may have more fields than are named here: those that a request asked for, such as `timings`.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def object_of(**fields: Schema) -> Schema:
    """All fields are required."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def with_optional(schema: Schema, **fields: Schema) -> Schema:
    return {**schema, "properties": schema["properties"] | fields}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def word(*values: str) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def page_of(entry: Schema) -> Schema:
    """OpenAI's list that is read in pages."""
    return object_of(
        object=word("list"),
        data=list_of(entry),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )


def deleted(kind: str) -> Schema:
    return object_of(id=TEXT, object=word(kind), deleted={"const": True})


USAGE = object_of(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
    completion_tokens_details=object_of(
        reasoning_tokens=COUNT, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT
    ),
)
VECTORS_USAGE = object_of(
    prompt_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
)
ITEMS_USAGE = object_of(
    input_tokens=COUNT,
    input_tokens_details=object_of(cached_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=object_of(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
TOOL_CALL = object_of(id=TEXT, type=word("function"), function=object_of(name=TEXT, arguments=TEXT))
MESSAGE = with_optional(
    object_of(role=word("assistant"), content=or_null(TEXT), refusal={"type": "null"}),
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=list_of(TOOL_CALL),
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
CHAT_CHOICE = with_optional(
    object_of(
        index=COUNT,
        message=MESSAGE,
        logprobs=or_null(object_of(content=list_of(ANY_OBJECT), refusal={"type": "null"})),
        finish_reason=word("stop", "length", "tool_calls"),
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
    ),
    token_ids=list_of(COUNT),
    prompt_token_ids=list_of(COUNT),
    prompt_logprobs=list_of(or_null(ANY_OBJECT)),
    timings=TIMINGS,
)
MODEL = object_of(
    id=TEXT,
    object=word("model"),
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    parent={"type": "null"},
    max_model_len=or_null(COUNT),
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
ANTHROPIC_MESSAGE = object_of(
    id=TEXT,
    type=word("message"),
    role=word("assistant"),
    model=TEXT,
    content=list_of(object_of(type=word("text", "tool_use", "thinking"))),
    stop_reason=TEXT,
    stop_sequence=or_null(TEXT),
    usage=object_of(
        input_tokens=COUNT,
        output_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
    ),
)
OLLAMA_HEAD: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
OLLAMA_DETAILS = object_of(format=TEXT, family=TEXT, families=list_of(TEXT))
OLLAMA_MODEL = object_of(
    name=TEXT, model=TEXT, modified_at=TEXT, size=COUNT, digest=TEXT, details=OLLAMA_DETAILS
)
REQUEST = object_of(
    id=TEXT,
    object=word("request"),
    request_id=TEXT,
    route=TEXT,
    model=TEXT,
    created=NUMBER,
    state=word("queued", "running", "finished", "failed", "aborted"),
    usage=ANY_OBJECT,
)
SERVED = object_of(status=word("ok"))

# By method and path: every route that answers with JSON.
ANSWERS: dict[tuple[str, str], Schema] = {
    ("post", "/v1/chat/completions"): with_optional(
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
    ("post", "/v1/embeddings"): object_of(
        object=word("list"),
        data=list_of(
            object_of(
                object=word("embedding"),
                index=COUNT,
                embedding={"anyOf": [list_of(NUMBER), TEXT]},
            )
        ),
        model=TEXT,
        usage=VECTORS_USAGE,
    ),
    ("post", "/v1/score"): object_of(
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
        usage=VECTORS_USAGE,
    ),
    ("post", "/v1/rerank"): object_of(
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
        usage=VECTORS_USAGE,
    ),
    ("post", "/v1/responses"): RESPONSE,
    ("post", "/v1/responses/input_tokens"): object_of(
        object=word("response.input_tokens"), input_tokens=COUNT
    ),
    ("get", "/v1/responses/{id}"): RESPONSE,
    ("delete", "/v1/responses/{id}"): deleted("response"),
    ("post", "/v1/responses/{id}/cancel"): RESPONSE,
    ("get", "/v1/responses/{id}/input_items"): page_of(ITEM),
    ("post", "/v1/messages"): ANTHROPIC_MESSAGE,
    ("post", "/v1/messages/count_tokens"): object_of(input_tokens=COUNT),
    ("post", "/api/chat"): object_of(
        **OLLAMA_HEAD, message=object_of(role=word("assistant"), content=TEXT)
    ),
    ("post", "/api/generate"): object_of(**OLLAMA_HEAD, response=TEXT),
    ("get", "/api/tags"): object_of(models=list_of(OLLAMA_MODEL)),
    ("get", "/api/ps"): object_of(models=list_of(OLLAMA_MODEL)),
    ("post", "/api/show"): object_of(
        modified_at=TEXT,
        parameters=TEXT,
        template=TEXT,
        details=OLLAMA_DETAILS,
        model_info=ANY_OBJECT,
        capabilities=list_of(TEXT),
    ),
    ("get", "/api/version"): object_of(version=TEXT),
    ("get", "/v1/models"): object_of(object=word("list"), data=list_of(MODEL)),
    ("get", "/v1/models/{name}"): MODEL,
    ("post", "/v1/files"): FILE,
    ("get", "/v1/files"): page_of(FILE),
    ("get", "/v1/files/{file_id}"): FILE,
    ("delete", "/v1/files/{file_id}"): deleted("file"),
    ("post", "/v1/batches"): BATCH,
    ("get", "/v1/batches"): page_of(BATCH),
    ("get", "/v1/batches/{batch_id}"): BATCH,
    ("post", "/v1/batches/{batch_id}/cancel"): BATCH,
    ("get", "/v1/requests/{name}"): REQUEST,
    ("post", "/tokenize"): object_of(
        count=COUNT,
        max_model_len=COUNT,
        tokens=list_of(COUNT),
        token_strs=or_null(list_of(or_null(TEXT))),
    ),
    ("post", "/detokenize"): object_of(prompt=TEXT),
    ("get", "/version"): object_of(version=TEXT),
    ("get", "/server_info"): object_of(
        version=TEXT, models=list_of(TEXT), engine=ANY_OBJECT, stats=ANY_OBJECT
    ),
    **{("get", path): SERVED for path in ("/health", "/readyz", "/ready", "/ping", "/livez")},
}
