"""Answers of Anthropic's and Ollama's routes."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Answers,
    Schema,
    list_of,
    object_of,
    or_null,
    with_optional,
    word,
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
ANSWERS: Answers = {
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
    ("post", "/api/embed"): with_optional(
        object_of(model=TEXT, embeddings=list_of(list_of(NUMBER))),
        total_duration=COUNT,
        load_duration=COUNT,
        prompt_eval_count=COUNT,
    ),
    ("post", "/api/embeddings"): object_of(embedding=list_of(NUMBER)),
    ("get", "/api/version"): object_of(version=TEXT),
}
