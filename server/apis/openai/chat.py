"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.chat_answer import ChatAnswer, Keep
from server.apis.openai.chat_schema import CHAT_UNSUPPORTED, ChatRequest
from server.apis.openai.chat_store import ChatStore
from server.apis.openai.content_schema import check_parts
from server.apis.openai.sampling_schema import openapi_body
from server.generation.chat_request import prepare_chat
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import owner_of, prefix_salt
from server.http.sse import EventStream, while_connected
from server.http.validation import parse
from server.state import state_of

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    summary="Continue a conversation",
    response_model=None,
    openapi_extra=openapi_body(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(request, checked)
    keep = await _keeper(request, body)
    turn = await prepare_chat(state, body, prefix_salt(request, body.cache_salt))
    answer = ChatAnswer(state, turn, keep)
    if body.stream:
        return EventStream(answer.stream, turn.close)
    return JsonBody(await while_connected(request.receive, answer.whole(), turn.close))


async def _keeper(request: Request, body: ChatRequest) -> Keep | None:
    """What keeps the answer, if it shall be.  Raises Unavailable if nothing can be kept now."""
    if not body.store:
        return None
    store = ChatStore(state_of(request).responses, owner_of(request))
    await store.check()

    async def keep(completion: dict[str, Any]) -> None:
        await store.keep(completion, body)

    return keep


def checked(fields: dict[str, Any]) -> ChatRequest:
    """Raises RequestError that names the wrong field."""
    check_parts(fields)
    return parse(ChatRequest, fields, CHAT_UNSUPPORTED)
