"""Answers that are made of vectors."""

from __future__ import annotations

from server.http.openapi_parts import (
    COUNT,
    NUMBER,
    TEXT,
    Answers,
    list_of,
    object_of,
    with_optional,
    word,
)

VECTORS_USAGE = object_of(
    prompt_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
)
ANSWERS: Answers = {
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
}
