"""Bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.errors import RequestError
from server.schema.base import MOST_MESSAGES, Body
from server.schema.chat import Message


class TokenizeRequest(Body):
    """Either a text, or messages to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=MOST_MESSAGES
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "send either `prompt` or `messages`",
                param="prompt",
                code="missing_required_parameter" if self.prompt is None else "invalid_value",
            )


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
