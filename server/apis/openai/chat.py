"""/v1/chat/completions, and /v1/chat/completions/{id}: answers that were made with `store`."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.apis.media import Readable
from server.apis.openai.answer_schema import CHAT, CHAT_EVENT, STORED_CHAT, STORED_MESSAGE
from server.apis.openai.chat_answer import ChatAnswer
from server.apis.openai.chat_schema import CHAT_UNSUPPORTED, ChatRequest, check_parts
from server.apis.openai.chat_store import ChatChange, ChatsQuery, ChatStore, MessagesQuery
from server.generation.chat_request import prepare_chat
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import deleted, page_schema
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of, prefix_salt
from server.http.sse import EventStream, while_connected
from server.http.validation import parse
from server.state import state_of

endpoints = Endpoints("chat and text")


@endpoints.post(
    "/v1/chat/completions",
    summary="Continue a conversation",
    body=ChatRequest,
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    answer=CHAT,
    stream=CHAT_EVENT,
)
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    readable = state.readable
    body = await read_checked(request, lambda fields: checked(fields, readable))
    keep = None
    if body.store:
        store = _store(request)
        await store.check()
        keep = partial(store.keep, body=body)
    generation = await prepare_chat(state, body, prefix_salt(request, body.cache_salt))
    answer = ChatAnswer(state, body, generation, keep)
    if body.stream:
        return EventStream(answer.stream, generation.close)
    return JsonBody(await while_connected(request.receive, answer.whole(), generation.close))


def checked(fields: dict[str, Any], readable: Readable) -> ChatRequest:
    check_parts(fields, readable)
    return parse(ChatRequest, fields, CHAT_UNSUPPORTED)


@endpoints.get(
    "/v1/chat/completions",
    summary="List stored chat completions",
    query=ChatsQuery,
    answer=page_schema(STORED_CHAT),
)
async def list_chats(request: Request) -> Response:
    query = parse_query(ChatsQuery, request.query_params)
    return JsonBody(await _store(request).page(query))


@endpoints.get("/v1/chat/completions/{id}", summary="A stored chat completion", answer=STORED_CHAT)
async def get_chat(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody((await _store(request).get(id)).response)


@endpoints.get(
    "/v1/chat/completions/{id}/messages",
    summary="What a stored chat completion answers",
    query=MessagesQuery,
    answer=page_schema(STORED_MESSAGE),
)
async def list_chat_messages(request: Request, id: str) -> Response:
    query = parse_query(MessagesQuery, request.query_params)
    return JsonBody(await _store(request).messages(id, query))


@endpoints.post(
    "/v1/chat/completions/{id}",
    summary="Change the metadata of a stored chat completion",
    body=ChatChange,
    example={"metadata": {"topic": "capitals"}},
    answer=STORED_CHAT,
)
async def change_chat(request: Request, id: str) -> Response:
    change = await read_checked(request, lambda fields: parse(ChatChange, fields))
    return JsonBody(await _store(request).describe(id, change.metadata or {}))


@endpoints.delete(
    "/v1/chat/completions/{id}",
    summary="Forget a chat completion",
    answer=deleted("chat.completion.deleted"),
)
async def delete_chat(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    await _store(request).delete(id)
    return JsonBody(orjson.dumps({"id": id, "object": "chat.completion.deleted", "deleted": True}))


def _store(request: Request) -> ChatStore:
    return ChatStore(state_of(request).responses, owner_of(request))
