"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.apis.field_names import map_error_fields
from server.apis.ollama import models as models
from server.apis.ollama.answer import STREAM, OllamaAnswer
from server.apis.ollama.raw_prompt import text_of
from server.apis.ollama.request import (
    FIELDS,
    REFUSED_FIELDS,
    check_context,
    known_fields,
    prompt_to_chat_request,
    to_chat_request,
)
from server.apis.ollama.schema import (
    OllamaBody,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from server.apis.openai.chat_schema import ChatRequest
from server.errors import RequestError
from server.generation.chat_request import (
    CHARS_PER_MESSAGE,
    GeneratedAnswer,
    ParsedChunk,
    prepare_chat,
)
from server.generation.choice import Choice, TextChunk
from server.generation.generation import Generation, require_ready
from server.generation.off_loop import off_loop
from server.generation.text_request import submit_texts
from server.http.endpoints import Endpoints, ErrorFormat
from server.http.json_body import JsonBody, read_any
from server.http.openapi_parts import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    TEXT,
    Schema,
    any_of,
    list_of,
    object_of,
    word,
)
from server.http.query import NoQuery, parse_query
from server.http.request_context import prefix_salt
from server.http.sse import EventStream, EventWriter, while_connected
from server.http.validation import Unsupported, parse
from server.state import ServerState, state_of
from server.tool_calls.parser.deltas import ContentDelta

endpoints = Endpoints("Ollama's API", ErrorFormat.OLLAMA, "application/x-ndjson")
HEAD: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
CHAT = object_of(**HEAD, message=object_of(role=word("assistant"), content=TEXT))
GENERATED = object_of(**HEAD, response=TEXT)
FAILURE = object_of(error=TEXT)
DETAILS = object_of(format=TEXT, family=TEXT, families=list_of(TEXT))
MODELS = object_of(
    models=list_of(
        object_of(name=TEXT, model=TEXT, modified_at=TEXT, size=COUNT, digest=TEXT, details=DETAILS)
    )
)
SHOWN = object_of(
    modified_at=TEXT,
    parameters=TEXT,
    template=TEXT,
    details=DETAILS,
    model_info=ANY_OBJECT,
    capabilities=list_of(TEXT),
)
ROUTE = "ollama"  # as records of requests say
B = TypeVar("B", bound=OllamaCall)


@endpoints.post(
    "/api/chat",
    summary="Continue a conversation (Ollama)",
    body=OllamaChatBody,
    example={
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": False,
    },
    answer=CHAT,
    stream=any_of(CHAT, FAILURE),
)
async def chat(request: Request) -> Response:
    state = state_of(request)
    name, body = await read_call(request, state, OllamaChatBody, REFUSED_FIELDS)
    answer = _answer_of(state, name, body, chat=True)
    if not body.messages:
        return _loaded(body, answer)
    work = CHARS_PER_MESSAGE * len(body.messages)
    with map_error_fields((), FIELDS):  # the messages are called the same
        wanted = await off_loop(work, lambda: to_chat_request(body, state.tokenizer))
        return await _answered(request, state, body, wanted, answer)


@endpoints.post(
    "/api/generate",
    summary="Continue a text, or answer it (Ollama)",
    body=OllamaGenerateBody,
    example={"prompt": "What is the capital of France?", "stream": False},
    answer=GENERATED,
    stream=any_of(GENERATED, FAILURE),
)
async def generate(request: Request) -> Response:
    state = state_of(request)
    name, body = await read_call(request, state, OllamaGenerateBody, REFUSED_FIELDS)
    answer = _answer_of(state, name, body, chat=False)
    if not body.prompt and not body.suffix:
        return _loaded(body, answer)
    if body.raw or body.suffix:
        salt = prefix_salt(request, None)
        with map_error_fields((), FIELDS), state.admission.reserve(1) as places:
            text = await text_of(state, body)
            generation, _ = await submit_texts(state, text, salt, ROUTE, places)
        return await _continued(request, body, generation, answer)
    paths = ["system", "prompt"] if body.system else ["prompt"]
    with map_error_fields(paths, FIELDS | {"messages$": "prompt"}):
        wanted = prompt_to_chat_request(body, state.tokenizer)
        return await _answered(request, state, body, wanted, answer)


@endpoints.get("/api/tags", summary="List the served models (Ollama)", head=True, answer=MODELS)
async def tags(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody(orjson.dumps({"models": models.tags(state_of(request))}))


@endpoints.get("/api/ps", summary="List the loaded models (Ollama)", head=True, answer=MODELS)
async def running(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    state = state_of(request)
    ready = state.client.ready
    return JsonBody(orjson.dumps({"models": [] if ready is None else models.running(state, ready)}))


@endpoints.post(
    "/api/show", summary="Describe a model (Ollama)", body=ShowBody, example={}, answer=SHOWN
)
async def show(request: Request) -> Response:
    state = state_of(request)
    body = await read_any(request, lambda fields: parse(ShowBody, fields))
    asked = body.model or body.name
    if asked is None:
        raise RequestError(
            "`model` is required: add it", param="model", code="missing_required_parameter"
        )
    state.check_model(models.served_name(state, asked))
    return JsonBody(orjson.dumps(models.description(state, require_ready(state))))


@endpoints.get(
    "/api/version", summary="Version of Ollama's API", head=True, answer=object_of(version=TEXT)
)
async def version(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody(orjson.dumps({"version": models.API_VERSION}))


async def read_call(
    request: Request, state: ServerState, model: type[B], unsupported: Mapping[str, Unsupported]
) -> tuple[str, B]:
    """The name that the caller calls the model by, and the checked body with its served name."""

    def check(fields: dict[str, Any]) -> B:
        body = parse(model, known_fields(fields), unsupported)
        body.check()
        return body

    body = await read_any(request, check)
    served = models.served_name(state, body.model)
    state.check_model(served)
    check_context(body, require_ready(state))
    return body.model, body.model_copy(update={"model": served})


def _answer_of(state: ServerState, name: str, body: OllamaBody, *, chat: bool) -> OllamaAnswer:
    top = (body.top_logprobs or 0) if body.logprobs else None
    return OllamaAnswer(name, state.tokenizer, chat=chat, top_logprobs=top)


def check_stays(body: OllamaCall) -> None:
    """Raises RequestError for a body without a prompt that asks to unload the model."""
    if body.unloads:
        raise RequestError(
            "`keep_alive` is 0 without a prompt, which asks to unload the model: this server keeps "
            "its model until it is stopped",
            param="keep_alive",
            code="unsupported_parameter",
        )


def _loaded(body: OllamaBody, answer: OllamaAnswer) -> Response:
    check_stays(body)
    media = STREAM.media_type if body.streams else "application/json"
    return Response(answer.loaded(), media_type=media)


async def _answered(
    request: Request,
    state: ServerState,
    body: OllamaBody,
    wanted: ChatRequest,
    answer: OllamaAnswer,
) -> Response:
    salt = prefix_salt(request, None)
    turn = await prepare_chat(state, wanted, salt, ROUTE, may_end_early=True)
    if body.streams:

        async def produce(writer: EventWriter) -> None:
            await turn.stream(answer.render, writer.write, writer.write_now)

        return EventStream(produce, turn.close, STREAM)
    [whole] = await while_connected(request.receive, turn.collect(), turn.close)
    return JsonBody(await answer.whole(whole))


async def _continued(
    request: Request, body: OllamaBody, generation: Generation, answer: OllamaAnswer
) -> Response:
    """The answer to a text that is no conversation."""

    def part_of(piece: TextChunk) -> ParsedChunk:
        return ParsedChunk(
            [ContentDelta(piece.text)] if piece.text else [], piece.scored, piece.finish
        )

    def render(choice: Choice, piece: TextChunk) -> bytes:
        return answer.render(choice, part_of(piece))

    async def produce(writer: EventWriter) -> None:
        await generation.stream(render, writer.write, writer.write_now)

    if body.streams:
        return EventStream(produce, generation.close, STREAM)
    [pieces] = await while_connected(request.receive, generation.collect(), generation.close)
    whole = GeneratedAnswer(generation.choices[0])
    for piece in pieces:
        whole.add(part_of(piece))
    return JsonBody(await answer.whole(whole))
