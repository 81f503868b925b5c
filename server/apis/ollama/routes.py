"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import Ready
from server.apis.field_names import map_error_fields
from server.apis.ollama import models
from server.apis.ollama.answer import STREAM, OllamaAnswer
from server.apis.ollama.request import (
    FIELDS,
    REFUSED_FIELDS,
    TEXT_FIELDS,
    image_parts,
    known_fields,
    prompt_image_parts,
    prompt_to_chat_request,
    to_chat_request,
    to_completion_request,
    with_context,
)
from server.apis.ollama.schema import (
    OllamaBody,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from server.errors import MissingParameter
from server.generation.chat_request import CHARS_PER_MESSAGE, prepare_chat
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
from server.http.sse import EventStream, FrameSink, while_connected
from server.http.validation import Unsupported, parse
from server.state import ServerState, state_of

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
    name, body, _ = await read_call(request, state, OllamaChatBody, REFUSED_FIELDS)
    answer = OllamaAnswer(name, body, state.tokenizer)
    if not body.messages:
        return _loaded(body, answer)
    work = CHARS_PER_MESSAGE * len(body.messages)
    # Messages have the same name in both APIs.
    with map_error_fields(FIELDS, parts=image_parts(body.messages)):
        chat_request = await off_loop(work, lambda: to_chat_request(body, state.tokenizer))
        salt = prefix_salt(request, None)
        generation = await prepare_chat(state, chat_request, salt, ROUTE, may_end_early=True)
        return await _answered(request, body, generation, answer)


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
    name, body, _ = await read_call(request, state, OllamaGenerateBody, REFUSED_FIELDS)
    answer = OllamaAnswer(name, body, state.tokenizer)
    if not body.prompt and not body.suffix and not body.images:
        return _loaded(body, answer)
    salt = prefix_salt(request, None)
    if body.raw or body.suffix:
        with map_error_fields(TEXT_FIELDS), state.admission.reserve(1) as slots:
            completion = await to_completion_request(state, body)
            generation, _ = await submit_texts(state, completion, salt, ROUTE, slots)
        return await _answered(request, body, generation, answer)
    with map_error_fields(FIELDS | {"messages": "prompt"}, parts=prompt_image_parts(body)):
        chat_request = prompt_to_chat_request(body, state.tokenizer)
        generation = await prepare_chat(state, chat_request, salt, ROUTE, may_end_early=True)
        return await _answered(request, body, generation, answer)


@endpoints.get("/api/tags", summary="List the served models (Ollama)", head=True, answer=MODELS)
async def tags(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody(orjson.dumps({"models": models.tags(state_of(request))}))


@endpoints.get("/api/ps", summary="List the loaded models (Ollama)", head=True, answer=MODELS)
async def running(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody(orjson.dumps({"models": models.running(state_of(request))}))


@endpoints.post(
    "/api/show", summary="Describe a model (Ollama)", body=ShowBody, example={}, answer=SHOWN
)
async def show(request: Request) -> Response:
    state = state_of(request)
    body = await read_any(request, lambda fields: parse(ShowBody, fields))
    requested = body.model or body.name
    if requested is None:
        raise MissingParameter("{model} is required: add it")
    state.check_model(models.served_name(state, requested))
    return JsonBody(orjson.dumps(models.description(state, require_ready(state))))


@endpoints.get(
    "/api/version", summary="Version of Ollama's API", head=True, answer=object_of(version=TEXT)
)
async def version(request: Request) -> Response:
    parse_query(NoQuery, request.query_params)
    return JsonBody(orjson.dumps({"version": models.API_VERSION}))


async def read_call(
    request: Request,
    state: ServerState,
    model: type[B],
    unsupported: Mapping[str, Unsupported] | None = None,
) -> tuple[str, B, Ready]:
    """The model's name as the client writes it, the checked body, and the engine's facts.

    The body has the served name; the facts have the requested context length.
    Raises RequestError.
    """

    readable = state.readable

    def check(fields: dict[str, Any]) -> B:
        body = parse(model, known_fields(fields, readable), unsupported)
        body.check()
        return body

    body = await read_any(request, check)
    served = models.served_name(state, body.model)
    state.check_model(served)
    ready = with_context(require_ready(state), body)
    return body.model, body.model_copy(update={"model": served}), ready


def _loaded(body: OllamaBody, answer: OllamaAnswer) -> Response:
    body.check_stays()
    media = STREAM.media_type if body.streams else "application/json"
    return Response(answer.loaded(), media_type=media)


async def _answered(
    request: Request, body: OllamaBody, generation: Generation, answer: OllamaAnswer
) -> Response:
    if body.streams:
        render = partial(answer.render, generation.choices[0])
        return EventStream(
            lambda writer: generation.stream([FrameSink(writer, render)]), generation.close, STREAM
        )
    [whole] = await while_connected(request.receive, generation.collect(), generation.close)
    return JsonBody(await answer.whole(whole))
