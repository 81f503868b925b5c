"""Bodies of Ollama's POST /api/embed and of /api/embeddings, its older form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Tag

from server.schema.base import by_kind
from server.schema.ollama import OllamaCall
from server.schema.pooling import MAX_TEXTS, Text

Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_TEXTS), Tag("~texts")],
    by_kind("a string or an array of strings", string="~text", array="~texts"),
]


class EmbedBody(OllamaCall):
    input: Input | None = None
    truncate: bool | None = None  # null is true here
    dimensions: int | None = Field(None, ge=0)  # 0: all

    def texts(self) -> list[str]:
        """One a vector; none where the model is only to be loaded."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []

    def path(self, place: int) -> str:
        """The field that holds entry `place` of `texts`."""
        return "input" if isinstance(self.input, str) else f"input[{place}]"


class EmbeddingsBody(OllamaCall):
    prompt: str | None = None
