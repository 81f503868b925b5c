"""POST /v1/messages and POST /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.apis.anthropic.checks import UNSUPPORTED, check_turns, prompt_too_long, refuse_known
from server.apis.anthropic.events import STREAM, MessageAnswer
from server.apis.anthropic.request import FIELDS, to_chat_request
from server.apis.anthropic.schema import CountRequest, MessagesRequest
from server.apis.field_names import Parts, Sources, map_error_fields
from server.apis.openai.chat_schema import ChatRequest
from server.constrained.reasoning_grammar import can_limit
from server.generation.chat_request import chat_prompt, prepare_chat
from server.http.endpoints import Endpoints, ErrorFormat
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    TEXT,
    events,
    list_of,
    object_of,
    or_null,
    with_optional,
    with_required,
    word,
)
from server.http.request_context import prefix_salt
from server.http.sse import EventStream, FrameSink, while_connected
from server.http.validation import parse
from server.state import state_of

endpoints = Endpoints("Anthropic's API", ErrorFormat.ANTHROPIC)
MESSAGE = object_of(
    id=TEXT,
    type=word("message"),
    role=word("assistant"),
    model=TEXT,
    content=list_of(object_of(type=word("text", "tool_use", "thinking"))),
    stop_reason=TEXT,
    stop_sequence=or_null(TEXT),
    usage=object_of(
        input_tokens=COUNT,
        output_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
    ),
)
OF_BLOCK = object_of(index=COUNT)
BEGUN = with_optional(MESSAGE, stop_reason={"type": "null"})
MESSAGE_EVENT = events(
    (("message_start",), object_of(message=BEGUN)),
    (("content_block_start",), with_required(OF_BLOCK, content_block=object_of(type=TEXT))),
    (("content_block_delta",), with_required(OF_BLOCK, delta=object_of(type=TEXT))),
    (("content_block_stop",), OF_BLOCK),
    (("message_delta",), object_of(delta=object_of(stop_reason=TEXT), usage=ANY_OBJECT)),
    (("message_stop", "ping"), object_of()),
    (("error",), object_of(error=object_of(type=TEXT, message=TEXT))),
)
ROUTE = "messages"  # in records of requests
B = TypeVar("B", bound=CountRequest)


@endpoints.post(
    "/v1/messages",
    summary="Continue a conversation (Anthropic)",
    body=MessagesRequest,
    example={
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 100,
    },
    answer=MESSAGE,
    stream=MESSAGE_EVENT,
)
async def messages(request: Request) -> Response:
    state = state_of(request)
    body, chat, sources, parts = await _read(request, MessagesRequest)
    with prompt_too_long(), map_error_fields(FIELDS, sources, parts):
        salt = prefix_salt(request, None)
        generation = await prepare_chat(state, chat, salt, ROUTE, may_end_early=True)
    show = body.thinking is None or body.thinking.display != "omitted"
    answer = MessageAnswer(chat, generation, show_thinking=show)
    if body.stream:
        return EventStream(
            lambda writer: generation.stream([FrameSink(writer, answer.render)]),
            generation.close,
            STREAM,
        )
    [whole] = await while_connected(request.receive, generation.collect(), generation.close)
    return JsonBody(answer.whole(whole))


@endpoints.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation (Anthropic)",
    body=CountRequest,
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    answer=object_of(input_tokens=COUNT),
)
async def count_tokens(request: Request) -> Response:
    _, chat, sources, parts = await _read(request, CountRequest)
    with prompt_too_long(), map_error_fields(FIELDS, sources, parts):
        _, prompt = await chat_prompt(state_of(request), chat)
    return JsonBody(orjson.dumps({"input_tokens": len(prompt)}))


async def _read(request: Request, model: type[B]) -> tuple[B, ChatRequest, Sources, Parts]:
    """The checked body, its ChatRequest, and the sources of the messages and images of that."""
    state = state_of(request)

    readable = state.readable

    def checked(fields: dict[str, Any]) -> tuple[B, ChatRequest, Sources, Parts]:
        refuse_known(fields, readable)
        body = parse(model, fields, UNSUPPORTED)
        body.check()
        check_turns(body.messages)
        chat, sources, parts = to_chat_request(body, state.tokenizer)
        reasoning, thinking = state.formats.formats.reasoning, body.thinking
        if thinking is not None and can_limit(reasoning, state.grammar_literals):
            chat["thinking_token_budget"] = thinking.budget_tokens
        with map_error_fields(FIELDS, sources, parts):
            return body, parse(ChatRequest, chat), sources, parts

    return await read_checked(request, checked)
