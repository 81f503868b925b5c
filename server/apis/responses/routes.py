"""/v1/responses: answers as items and events, stored for as long as the store has room."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.apis.media import Readable
from server.apis.responses.answer import ResponseAnswer
from server.apis.responses.answer_schema import ITEM, RESPONSE, RESPONSE_EVENT
from server.apis.responses.background import BackgroundResponses
from server.apis.responses.database import RUNNING, ResponsesDatabase, Stored
from server.apis.responses.items import ItemId, JsonItem, input_items, refuse_foreign_items
from server.apis.responses.output import Events
from server.apis.responses.schema import (
    COUNTED,
    RESPONSES_UNSUPPORTED,
    Includes,
    ResponsesRequest,
    refuse_uncounted,
)
from server.apis.responses.store import find, history, keep, missing, resolved
from server.apis.responses.tools_schema import refuse_foreign_tools
from server.apis.responses.translate import (
    CHARS_PER_ITEM,
    Conversation,
    conversation_of,
    with_chat_request,
)
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.generation.chat_request import chat_prompt, prepare_chat
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.openapi_parts import COUNT, deleted, object_of, page_schema, word
from server.http.pagination import page_of
from server.http.query import NoQuery, parse_query
from server.http.request_context import owner_of, prefix_salt
from server.http.sse import EventStream, while_connected
from server.http.validation import Body, parse
from server.state import state_of


class RetrieveQuery(Body):
    include: Includes | None = None
    include_obfuscation: bool | None = None
    starting_after: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        if self.include_obfuscation:
            raise UnsupportedParameter(
                "{include_obfuscation} is not supported by this server: use false"
            )
        if self.starting_after is not None and not self.stream:
            raise RequestError(
                "{starting_after} is only allowed when {stream} is true: set it or leave "
                "{starting_after} out"
            )


class ItemsQuery(Body):
    after: ItemId | None = None
    include: Includes | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


endpoints = Endpoints("responses")
ROUTE = "responses"  # in records of requests


@endpoints.post(
    "/v1/responses",
    summary="Answer with items: messages, reasoning, function calls",
    body=ResponsesRequest,
    example={"input": "What is the capital of France?"},
    answer=RESPONSE,
    stream=RESPONSE_EVENT,
)
async def create_response(request: Request) -> Response:
    state = state_of(request)
    body, items = await _read(request)
    require_ready(state)
    with state.admission.reserve(1) as slots:
        conversation = await _conversation(request, body, items)
        salt = prefix_salt(request, body.cache_salt)
        generation = await with_chat_request(
            state,
            body,
            conversation,
            lambda chat: prepare_chat(state, chat, salt, ROUTE, slots=slots),
        )

    async def on_end(response: JsonItem) -> None:
        if body.stored and not body.background:
            await keep(state.responses, owner_of(request), response, items)

    answer = ResponseAnswer(state, body, generation, on_end)
    if body.background:
        return await _in_background(request, answer, body, items)
    if body.stream:
        return EventStream(answer.stream, generation.close, answer.events.stream_format())
    whole = await while_connected(request.receive, answer.whole(), generation.close)
    return JsonBody(orjson.dumps(whole))


def read_request(fields: dict[str, Any], readable: Readable) -> ResponsesRequest:
    """A checked body.  Raises RequestError that names the wrong field."""
    refuse_foreign_items(fields, readable)
    refuse_foreign_tools(fields)
    body = parse(ResponsesRequest, fields, RESPONSES_UNSUPPORTED)
    body.check()
    return body


async def _read(
    request: Request, *, count_only: bool = False
) -> tuple[ResponsesRequest, list[JsonItem]]:
    """The checked body, and the items of its input as they are stored.

    count_only: fields that do not change the prompt are refused
    """

    state = state_of(request)
    readable = state.readable

    def checked(fields: dict[str, Any]) -> tuple[ResponsesRequest, list[JsonItem]]:
        if count_only:
            refuse_uncounted(fields)
        body = read_request(fields, readable)
        return body, input_items(body.input)

    body, items = await read_checked(request, checked)
    state.check_model(body.model)
    return body, await resolved(state.responses, owner_of(request), items)


async def _conversation(
    request: Request, body: ResponsesRequest, items: list[JsonItem]
) -> Conversation:
    """The whole conversation that the request continues."""
    earlier: list[JsonItem] = []
    last = body.previous_response_id
    if last is not None:
        owner = owner_of(request)
        store = state_of(request).responses
        earlier = await store.call(lambda database: history(database, owner, last))
    size = CHARS_PER_ITEM * (len(earlier) + len(items))
    return await off_loop(size, lambda: conversation_of(body, earlier, items))


@endpoints.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of an input",
    body=ResponsesRequest,
    body_fields=COUNTED,
    example={"input": "What is the capital of France?"},
    answer=object_of(object=word("response.input_tokens"), input_tokens=COUNT),
)
async def count_input_tokens(request: Request) -> Response:
    body, items = await _read(request, count_only=True)
    conversation = await _conversation(request, body, items)
    state = state_of(request)
    _, prompt = await with_chat_request(
        state, body, conversation, lambda chat: chat_prompt(state, chat)
    )
    return JsonBody(orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt)}))


async def _in_background(
    request: Request, answer: ResponseAnswer, body: ResponsesRequest, items: list[JsonItem]
) -> Response:
    """The queued response, or its events; it is generated even if the client disconnects."""
    queued = dict(answer.response)
    gate = request.app.state.drain_state
    streamed = bool(body.stream)
    try:
        await background_of(request).start(answer, items, owner_of(request), streamed, gate)
    except BaseException:
        answer.generation.close()
        raise
    return _follow(request, queued["id"], -1) if streamed else JsonBody(orjson.dumps(queued))


@endpoints.get(
    "/v1/responses/{id}",
    summary="A stored response, or its events",
    query=RetrieveQuery,
    answer=RESPONSE,
    stream=RESPONSE_EVENT,
)
async def retrieve_response(request: Request, id: str) -> Response:
    query = parse_query(RetrieveQuery, request.query_params)
    query.check()
    stored = await _find(request, id)
    if not query.stream:
        return JsonBody(stored.response)
    if not stored.streamed:
        raise RequestError(
            "the events of '{}' were not kept: only those of a response that was made with both "
            "{background} and {stream} are",
            id,
            param=FieldPath("stream"),
        )
    after = -1 if query.starting_after is None else query.starting_after
    return _follow(request, id, after)


@endpoints.delete("/v1/responses/{id}", summary="Forget a response", answer=deleted("response"))
async def delete_response(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    owner = owner_of(request)
    if not await state_of(request).responses.call(lambda database: database.delete(owner, id)):
        raise missing(id)
    return JsonBody(orjson.dumps({"id": id, "object": "response", "deleted": True}))


@endpoints.post("/v1/responses/{id}/cancel", summary="Stop a background response", answer=RESPONSE)
async def cancel_response(request: Request, id: str) -> Response:
    parse_query(NoQuery, request.query_params)
    stored = await _find(request, id)
    if not orjson.loads(stored.response)["background"]:
        raise RequestError(
            "Cannot cancel a synchronous response: '{}' was not made with {background}",
            id,
            param=FieldPath("id"),
        )
    if stored.status in RUNNING:
        await background_of(request).cancel(id)
        stored = await _find(request, id)
    return JsonBody(stored.response)


@endpoints.get(
    "/v1/responses/{id}/input_items",
    summary="What a response answers",
    query=ItemsQuery,
    answer=page_schema(ITEM),
)
async def list_input_items(request: Request, id: str) -> Response:
    query = parse_query(ItemsQuery, request.query_params)
    owner = owner_of(request)

    def work(database: ResponsesDatabase) -> bytes:
        items = orjson.loads(find(database, owner, id).input)
        return orjson.dumps(page_of(items, query, f"input item of '{id}'"))

    return JsonBody(await state_of(request).responses.call(work))


def background_of(request: Request) -> BackgroundResponses:
    background: BackgroundResponses = request.app.state.background
    return background


async def _find(request: Request, id: str) -> Stored:
    owner = owner_of(request)
    return await state_of(request).responses.call(lambda database: find(database, owner, id))


def _follow(request: Request, id: str, after: int) -> Response:
    background = background_of(request)
    return EventStream(
        lambda writer: background.follow(id, after, writer.write),
        lambda: None,
        Events().stream_format(),
    )
