"""POST /v1/messages and POST /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.apis.anthropic.checks import UNSUPPORTED, check_turns, refuse_known
from server.apis.anthropic.events import STREAM, MessageEvents, whole_message
from server.apis.anthropic.request import FIELDS, to_chat_request
from server.apis.anthropic.schema import CountRequest, MessagesRequest
from server.apis.field_names import map_error_fields
from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.sampling_schema import openapi_body
from server.constrained.reasoning_grammar import can_limit
from server.generation.chat_request import chat_prompt, prepare_chat
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import prefix_salt
from server.http.sse import EventStream, EventWriter, while_connected
from server.http.validation import parse
from server.state import state_of

router = APIRouter()
ROUTE = "messages"  # as records of requests say
B = TypeVar("B", bound=CountRequest)


@router.post(
    "/v1/messages",
    summary="Continue a conversation (Anthropic)",
    response_model=None,
    openapi_extra=openapi_body(MessagesRequest),
)
async def messages(request: Request) -> Response:
    state = state_of(request)
    body, chat, paths = await _read(request, MessagesRequest)
    with map_error_fields(paths, FIELDS):
        salt = prefix_salt(request, None)
        turn = await prepare_chat(state, chat, salt, ROUTE, may_end_early=True)
    show = body.thinking is None or body.thinking.display != "omitted"
    if body.stream:

        async def produce(writer: EventWriter) -> None:
            render = MessageEvents(turn, show_thinking=show).render
            await turn.stream(render, writer.write, writer.write_now)

        return EventStream(produce, turn.close, STREAM)
    [answer] = await while_connected(request.receive, turn.collect(), turn.close)
    return JsonBody(whole_message(turn, answer, show_thinking=show))


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation (Anthropic)",
    response_model=None,
    openapi_extra=openapi_body(CountRequest),
)
async def count_tokens(request: Request) -> Response:
    _, chat, paths = await _read(request, CountRequest)
    with map_error_fields(paths, FIELDS):
        _, prompt = await chat_prompt(state_of(request), chat)
    return JsonBody(orjson.dumps({"input_tokens": len(prompt)}))


async def _read(request: Request, model: type[B]) -> tuple[B, ChatRequest, list[str]]:
    """The checked body, what it asks for, and where each message of that came from."""
    state = state_of(request)

    def checked(fields: dict[str, Any]) -> tuple[B, ChatRequest, list[str]]:
        refuse_known(fields)
        body = parse(model, fields, UNSUPPORTED)
        body.check()
        check_turns(body.messages)
        wanted, paths = to_chat_request(body, state.tokenizer)
        reasoning, thinking = state.formats.formats.reasoning, body.thinking
        if thinking is not None and can_limit(reasoning, state.grammar_literals):
            wanted["thinking_token_budget"] = thinking.budget_tokens
        with map_error_fields(paths, FIELDS):
            return body, parse(ChatRequest, wanted), paths

    return await read_checked(request, checked)
