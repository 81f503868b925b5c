"""POST /tokenize and POST /detokenize, also under /v1."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.chat_schema import CHAT_UNSUPPORTED, ChatRequest, Message, Scalar
from server.apis.openai.content_schema import check_parts
from server.apis.openai.tools_schema import MAX_TOOLS, Tool
from server.errors import RequestError, UnsupportedParameter
from server.generation.chat_request import chat_prompt
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.generation.sampling_params import check_chars, check_token_ids
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import COUNT, TEXT, list_of, object_of, or_null
from server.http.validation import MAX_MESSAGES, Body, few_entries, parse
from server.state import state_of

# Of a conversation, as in chat completions: they make its prompt.
OF_CHATS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class TokenizeRequest(Body):
    """Either a text, or messages to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES
    )
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
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


endpoints = Endpoints("models, tokens, requests")
TOKENS = object_of(
    count=COUNT,
    max_model_len=COUNT,
    tokens=list_of(COUNT),
    token_strs=or_null(list_of(or_null(TEXT))),
)
UNSUPPORTED = {
    name: CHAT_UNSUPPORTED[name] for name in ("chat_template", "documents", "mm_processor_kwargs")
}


@endpoints.post(
    "/tokenize",
    summary="Text or messages to token ids",
    aliases=["/v1/tokenize"],
    body=TokenizeRequest,
    example={"prompt": "Hello, world!"},
    answer=TOKENS,
)
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(request, checked)
    if body.model is not None:
        state.check_model(body.model)
    tokenizer = state.tokenizer
    if body.messages is not None:
        chat = body.chat(body.model or state.config.served_names[0])
        ready, tokens = await chat_prompt(state, chat)
    else:
        ready, text = require_ready(state), body.prompt or ""
        check_chars(len(text), tokenizer, ready, "prompt")
        special = body.add_special_tokens is not False
        tokens = await off_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
        )

    def work() -> bytes:
        spelled = None
        if body.return_token_strs:
            spelled = [tokenizer.tokenizer.id_to_token(token) for token in tokens]
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": ready.max_model_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
        return orjson.dumps(answer)

    return JsonBody(await off_loop(len(tokens), work))


def checked(fields: dict[str, Any]) -> TokenizeRequest:
    """Raises RequestError that names the wrong field."""
    check_parts(fields)
    body = parse(TokenizeRequest, fields, UNSUPPORTED)
    body.check()
    return body


@endpoints.post(
    "/detokenize",
    summary="Token ids to text",
    aliases=["/v1/detokenize"],
    body=DetokenizeRequest,
    example={"tokens": [39, 68, 75]},
    answer=object_of(prompt=TEXT),
)
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(request, lambda fields: parse(DetokenizeRequest, fields))
    if body.model is not None:
        state.check_model(body.model)
    ready = require_ready(state)

    def work() -> bytes:
        check_token_ids(body.tokens, ready.vocab_size, "tokens")
        return orjson.dumps({"prompt": state.tokenizer.decode(body.tokens, skip_special=False)})

    return JsonBody(await off_loop(len(body.tokens), work))
