"""docs/api.md names every field of Anthropic's and Ollama's requests."""

from __future__ import annotations

import pytest

from server.apis.anthropic.schema import MessagesRequest
from server.apis.ollama.embeddings import EmbedBody, EmbeddingsBody
from server.apis.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from server.http.validation import Body
from tests.support.paths import ROOT

DOCS = (ROOT / "docs" / "api.md").read_text("utf-8")


def section(title: str) -> str:
    return DOCS.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Anthropic's messages", MessagesRequest),
        ("Ollama's API", OllamaChatBody),
        ("Ollama's API", OllamaGenerateBody),
        ("Ollama's API", OllamaOptions),
        ("Ollama's API", EmbedBody),
        ("Ollama's API", EmbeddingsBody),
    ],
)
def test_every_field_is_described(title: str, model: type[Body]):
    text = section(title)
    assert [name for name in model.model_fields if f"`{name}`" not in text] == []
