"""A request to each route that takes JSON, as /docs offers them to try out."""

from __future__ import annotations

from typing import Any

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France?"}]

# Without the name of the model, which the server knows.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/chat/completions/{id}": {"metadata": {"topic": "capitals"}},
    "/v1/completions": {"prompt": "The capital of Norway is", "max_tokens": 16},
    "/v1/responses": {"input": "What is the capital of France?"},
    "/v1/responses/input_tokens": {"input": "What is the capital of France?"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 100},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/api/chat": {"messages": QUESTION, "stream": False},
    "/api/generate": {"prompt": "What is the capital of France?", "stream": False},
    "/api/show": {},
    "/api/embed": {"input": ["the first text", "the second"]},
    "/api/embeddings": {"prompt": "a text"},
    "/v1/embeddings": {"input": ["the first text", "the second"]},
    "/v1/score": {"text_1": "a cat", "text_2": ["a dog", "a house"]},
    "/v1/rerank": {"query": "a cat", "documents": ["a dog", "a house"]},
    "/tokenize": {"prompt": "Hello, world!"},
    "/detokenize": {"tokens": [39, 68, 75]},
    "/v1/batches": {
        "input_file_id": "file-...",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
}
MODELLESS = ("/v1/batches", "/v1/chat/completions/{id}")


def example_of(path: str, model: str) -> dict[str, Any]:
    """The example body for a route, asking for this model."""
    fields = EXAMPLES[path]
    return fields if path in MODELLESS else {"model": model} | fields
