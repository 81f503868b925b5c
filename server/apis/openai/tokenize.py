"""POST /tokenize and POST /detokenize, also under /v1."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.apis.media import Readable
from server.apis.openai.chat_schema import (
    CHAT_UNSUPPORTED,
    ChatRequest,
    Messages,
    TemplateOptions,
    check_parts,
)
from server.apis.openai.tools_schema import Tools
from server.errors import FieldPath, MissingParameter, RequestError, UnsupportedParameter
from server.generation.chat_request import chat_prompt
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.generation.sampling_params import check_chars, check_token_ids
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import COUNT, TEXT, list_of, object_of, or_null
from server.http.validation import Body, parse
from server.state import state_of

# Fields of ChatRequest that make the prompt of a conversation.
CHAT_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class TokenizeRequest(Body):
    """Either a text, or messages to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            kind = MissingParameter if self.prompt is None else RequestError
            raise kind("send either `prompt` or `messages`", param=FieldPath("prompt"))
        for name in CHAT_FIELDS:
            if self.prompt is not None and getattr(self, name) is not None:
                raise RequestError(
                    "{} belongs to {messages}, not to {prompt}: leave it out", FieldPath(name)
                )
        if self.messages is not None and self.add_special_tokens:
            raise UnsupportedParameter(
                "{add_special_tokens} belongs to {prompt}: the chat template adds those of "
                "{messages}; leave it out"
            )


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
    name: CHAT_UNSUPPORTED[name]
    for name in ("chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs")
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
    readable = state.readable
    body = await read_checked(request, lambda fields: checked(fields, readable))
    if body.model is not None:
        state.check_model(body.model)
    tokenizer = state.tokenizer
    if body.messages is not None:
        model = body.model or state.config.served_names[0]
        fields = {name: getattr(body, name) for name in CHAT_FIELDS}  # validated
        chat = ChatRequest.model_construct(model=model, **fields)
        ready, tokens = await chat_prompt(state, chat)
    else:
        ready, text = require_ready(state), body.prompt or ""
        check_chars(len(text), tokenizer, ready, FieldPath("prompt"))
        special = body.add_special_tokens is not False
        tokens = await off_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
        )

    def work() -> bytes:
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.tokenizer.id_to_token(token) for token in tokens]
        return orjson.dumps(
            {
                "count": len(tokens),
                "max_model_len": ready.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    return JsonBody(await off_loop(len(tokens), work))


def checked(fields: dict[str, Any], readable: Readable) -> TokenizeRequest:
    check_parts(fields, readable)
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
        check_token_ids(body.tokens, ready.vocab_size, FieldPath("tokens"))
        return orjson.dumps({"prompt": state.tokenizer.decode(body.tokens, skip_special=False)})

    return JsonBody(await off_loop(len(body.tokens), work))
