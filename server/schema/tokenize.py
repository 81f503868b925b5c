"""Bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from server.errors import RequestError, UnsupportedParameter
from server.schema.base import MOST_MESSAGES, Body, few_entries
from server.schema.chat import ChatRequest, Message, Scalar
from server.schema.tools import MOST_TOOLS, Tool

# Of a conversation, as in chat completions: they make its prompt.
OF_CHATS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class TokenizeRequest(Body):
    """Either a text, or messages to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=MOST_MESSAGES
    )
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], BeforeValidator(few_entries(32))] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "send either `prompt` or `messages`",
                param="prompt",
                code="missing_required_parameter" if self.prompt is None else "invalid_value",
            )
        for name in OF_CHATS:
            if self.prompt is not None and getattr(self, name) is not None:
                raise RequestError(
                    f"`{name}` belongs to `messages`, not to `prompt`: leave it out", param=name
                )
        if self.messages is not None and self.add_special_tokens:
            raise UnsupportedParameter(
                "`add_special_tokens` belongs to `prompt`: the chat template adds those of "
                "`messages`; leave it out",
                param="add_special_tokens",
            )

    def chat(self, model: str) -> ChatRequest:
        """A request whose prompt these `messages` make; they have been validated."""
        fields = {name: getattr(self, name) for name in OF_CHATS}
        return ChatRequest.model_construct(model=model, **fields)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
