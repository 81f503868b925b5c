"""/v1/chat/completions/{id}: answers that were made with `store`."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.chat_store import ChatChange, ChatsQuery, ChatStore, MessagesQuery
from server.apis.openai.sampling_schema import openapi_body
from server.http.json_body import JsonBody, read_checked
from server.http.query import NoQuery, openapi_query, parse_query
from server.http.request_context import owner_of
from server.http.validation import parse
from server.state import state_of

router = APIRouter()


@router.get(
    "/v1/chat/completions",
    summary="List stored chat completions",
    response_model=None,
    openapi_extra=openapi_query(ChatsQuery),
)
async def list_chats(request: Request) -> Response:
    query = parse_query(ChatsQuery, request.query_params)
    return JsonBody(await _store(request).page(query))


@router.get("/v1/chat/completions/{id}", summary="A stored chat completion", response_model=None)
async def get_chat(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody((await _store(request).get(id)).response)


@router.get(
    "/v1/chat/completions/{id}/messages",
    summary="What a stored chat completion answers",
    response_model=None,
    openapi_extra=openapi_query(MessagesQuery),
)
async def list_chat_messages(request: Request, id: str) -> Response:
    query = parse_query(MessagesQuery, request.query_params)
    return JsonBody(await _store(request).messages(id, query))


@router.post(
    "/v1/chat/completions/{id}",
    summary="Change the metadata of a stored chat completion",
    response_model=None,
    openapi_extra=openapi_body(ChatChange),
)
async def change_chat(request: Request, id: str) -> Response:
    change = await read_checked(request, lambda fields: parse(ChatChange, fields))
    return JsonBody(await _store(request).describe(id, change.metadata or {}))


@router.delete("/v1/chat/completions/{id}", summary="Forget a chat completion", response_model=None)
async def delete_chat(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    await _store(request).delete(id)
    return JsonBody(orjson.dumps({"id": id, "object": "chat.completion.deleted", "deleted": True}))


def _store(request: Request) -> ChatStore:
    return ChatStore(state_of(request).responses, owner_of(request))
