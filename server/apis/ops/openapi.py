"""Answers about models, tokens, requests and the server itself."""

from __future__ import annotations

from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    NUMBER,
    TEXT,
    Answers,
    list_of,
    object_of,
    or_null,
    word,
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
ANSWERS: Answers = {
    ("get", "/v1/models"): object_of(object=word("list"), data=list_of(MODEL)),
    ("get", "/v1/models/{name}"): MODEL,
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
