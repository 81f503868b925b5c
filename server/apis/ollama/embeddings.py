"""Ollama's API: /api/embed, and /api/embeddings, its older form."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import orjson
from msgspec.structs import replace
from pydantic import Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import PoolingParams, Ready
from server.apis.field_names import map_error_fields
from server.apis.ollama.routes import ROUTE, check_stays, read_call
from server.apis.ollama.schema import OllamaCall
from server.apis.openai.embeddings_schema import MAX_TEXTS, Text
from server.errors import RequestError
from server.generation.embeddings import (
    EmbeddingInput,
    PoolingJob,
    decode_embedding,
    reserve_prompts,
    tokenize_inputs,
)
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.generation.pooling_default import pooling_of
from server.http.endpoints import Endpoints, ErrorFormat
from server.http.json_body import JsonBody
from server.http.openapi_parts import COUNT, NUMBER, TEXT, list_of, object_of, with_optional
from server.http.request_context import prefix_salt
from server.http.sse import while_connected
from server.http.validation import Unsupported, by_kind
from server.state import ServerState, state_of

Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_TEXTS), Tag("~texts")],
    by_kind("a string or an array of strings", string="~text", array="~texts"),
]


class EmbedBody(OllamaCall):
    input: Input | None = None
    truncate: bool | None = None  # null is true here
    dimensions: int | None = Field(None, ge=0)  # 0: all

    def texts(self) -> list[str]:
        """One a vector; none where the model is only to be loaded."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []

    def path(self, place: int) -> str:
        """The field that holds entry `place` of `texts`."""
        return "input" if isinstance(self.input, str) else f"input[{place}]"


class EmbeddingsBody(OllamaCall):
    prompt: str | None = None


endpoints = Endpoints("Ollama's API", ErrorFormat.OLLAMA)
EMBEDDINGS = with_optional(
    object_of(model=TEXT, embeddings=list_of(list_of(NUMBER))),
    total_duration=COUNT,
    load_duration=COUNT,
    prompt_eval_count=COUNT,
)

# What /v1/embeddings calls it -> what to send instead, in messages
EMBED_FIELDS: Mapping[str, str] = {"truncate_prompt_tokens": "truncate"}
EMBEDDINGS_FIELDS: Mapping[str, str] = {"truncate_prompt_tokens": "truncate` of `/api/embed"}
NOTHING_ELSE: Mapping[str, Unsupported] = {}


@endpoints.post(
    "/api/embed",
    summary="Texts to vectors (Ollama)",
    body=EmbedBody,
    example={"input": ["the first text", "the second"]},
    answer=EMBEDDINGS,
)
async def embed(request: Request) -> Response:
    began = time.monotonic()
    state = state_of(request)
    name, body = await read_call(request, state, EmbedBody, NOTHING_ELSE)
    ready = _within(body, require_ready(state))
    size = body.dimensions or 0
    if size > ready.hidden_size:
        raise RequestError(
            f"`dimensions` is {size}: the vectors of {name} have {ready.hidden_size}; lower it or "
            "leave it out",
            param="dimensions",
        )
    kept = None if body.truncate is False else ready.max_model_len
    given = [
        EmbeddingInput(text, body.path(place), kept, "right")
        for place, text in enumerate(body.texts())
    ]
    if not given:
        check_stays(body)
        return JsonBody(orjson.dumps({"model": name, "embeddings": []}))
    with map_error_fields((), EMBED_FIELDS):
        found, vectors = await _vectors(request, state, body, ready, given, size=size)
    timing_fields = {
        "total_duration": round((time.monotonic() - began) * 1e9),
        "load_duration": round(vectors.waited_seconds * 1e9),
        "prompt_eval_count": vectors.num_tokens,
    }

    def work() -> bytes:
        rows = [decode_embedding(vector) for vector in found]
        return orjson.dumps({"model": name, "embeddings": rows, **timing_fields})

    return JsonBody(await off_loop(sum(map(len, found)) // 4, work))


@endpoints.post(
    "/api/embeddings",
    summary="A text to a vector (Ollama's older route)",
    body=EmbeddingsBody,
    example={"prompt": "a text"},
    answer=object_of(embedding=list_of(NUMBER)),
)
async def embeddings(request: Request) -> Response:
    state = state_of(request)
    _, body = await read_call(request, state, EmbeddingsBody, NOTHING_ELSE)
    if not body.prompt:
        check_stays(body)
        return JsonBody(b'{"embedding":[]}')
    ready = _within(body, require_ready(state))
    given = [EmbeddingInput(body.prompt, "prompt")]
    with map_error_fields((), EMBEDDINGS_FIELDS):
        # Its clients expect what the model gives, of whatever length.
        [found], _ = await _vectors(request, state, body, ready, given, normalize=False)
    return JsonBody(orjson.dumps({"embedding": decode_embedding(found)}))


def _within(body: OllamaCall, ready: Ready) -> Ready:
    """With the context that the caller wants, which is no larger than the model's."""
    wanted = None if body.options is None else body.options.num_ctx
    return ready if wanted is None else replace(ready, max_model_len=wanted)


async def _vectors(
    request: Request,
    state: ServerState,
    body: OllamaCall,
    ready: Ready,
    given: Sequence[EmbeddingInput],
    *,
    size: int = 0,
    normalize: bool = True,
) -> tuple[list[bytes], PoolingJob]:
    """Little-endian float32, one entry a text, and who made them.  Raises RequestError."""
    config = state.config
    kind = pooling_of(config.model_directory, config.pooling, None, "start it with --pooling")
    with reserve_prompts(state, len(given)) as places:
        prompts = await tokenize_inputs(state, ready, given)
        pooling = PoolingParams(kind, size, normalize)
        salt = prefix_salt(request, None)
        vectors = PoolingJob(state, ROUTE, body.model, prompts, pooling, places, salt=salt)
        return await while_connected(request.receive, vectors.collect(), vectors.close), vectors
