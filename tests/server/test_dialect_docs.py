"""docs/api.md names every field of Anthropic's and Ollama's requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.schema.anthropic import MessagesRequest
from server.schema.base import Body
from server.schema.ollama import OllamaChatBody, OllamaGenerateBody, Options
from server.schema.ollama_embed import EmbedBody, EmbeddingsBody

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")


def section(title: str) -> str:
    return DOCS.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Anthropic's messages", MessagesRequest),
        ("Ollama's API", OllamaChatBody),
        ("Ollama's API", OllamaGenerateBody),
        ("Ollama's API", Options),
        ("Ollama's API", EmbedBody),
        ("Ollama's API", EmbeddingsBody),
    ],
)
def test_every_field_is_described(title: str, model: type[Body]):
    text = section(title)
    assert [name for name in model.model_fields if f"`{name}`" not in text] == []
