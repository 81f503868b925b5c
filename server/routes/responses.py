"""/v1/responses: answers as items and events."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat_service import ChatTurn, prepare_chat
from server.errors import RequestError
from server.responses.answer import ResponseAnswer
from server.responses.items import JsonItem, input_items, new_id
from server.responses.translate import chat_request, conversation_of
from server.routes.body import read_body
from server.schema.base import parse
from server.schema.response_items import refuse_foreign_items
from server.schema.responses import (
    RESPONSES_UNSUPPORTED,
    ResponsesRequest,
    refuse_foreign_tools,
)
from server.schema.sampling import openapi_body
from server.sse import EventStream, EventWriter, while_connected
from server.state import ServerState, prefix_salt, state_of

router = APIRouter()
ROUTE = "responses"  # the metrics' name


@router.post(
    "/v1/responses",
    summary="Answer with items: messages, reasoning, function calls",
    response_model=None,
    openapi_extra=openapi_body(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    state = state_of(request)
    fields = await read_body(request)
    refuse_foreign_items(fields)
    refuse_foreign_tools(fields)
    body = parse(ResponsesRequest, fields, RESPONSES_UNSUPPORTED)
    body.check()
    turn = await _prepare(state, body, prefix_salt(request, body.cache_salt))
    answer = ResponseAnswer(new_id("resp"), state, body, turn, _keep)
    if body.stream:

        async def produce(writer: EventWriter) -> None:
            await answer.stream(writer.write)

        return EventStream(produce, turn.close, answer.events.wire())
    try:
        whole = await while_connected(request.receive, answer.whole())
    finally:
        turn.close()
    return Response(orjson.dumps(whole), media_type="application/json")


async def _prepare(state: ServerState, body: ResponsesRequest, salt: bytes) -> ChatTurn:
    conversation = conversation_of(body, [], input_items(body))
    chat = chat_request(body, conversation)
    try:
        return await prepare_chat(state, chat, salt, ROUTE)
    except RequestError as error:
        raise conversation.own_words(error) from None


async def _keep(response: JsonItem) -> None:
    pass
