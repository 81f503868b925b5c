"""Ollama's API: /api/embed, and /api/embeddings, its older form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import orjson
from pydantic import Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import PoolingParams, Ready
from server.apis.field_names import map_error_fields
from server.apis.ollama.routes import ROUTE, read_call
from server.apis.ollama.schema import OllamaCall
from server.apis.openai.embeddings_schema import MAX_TEXTS, Text
from server.errors import FieldPath, RequestError
from server.generation.embeddings import (
    EmbeddingInput,
    PoolingJob,
    decode_embedding,
    reserve_prompts,
    tokenize_inputs,
)
from server.generation.off_loop import off_loop
from server.generation.pooling_default import pooling_of
from server.generation.sampling_params import Truncation
from server.http.endpoints import Endpoints, ErrorFormat
from server.http.json_body import JsonBody
from server.http.openapi_parts import COUNT, NUMBER, TEXT, list_of, object_of, with_optional
from server.http.request_context import prefix_salt
from server.http.sse import while_connected
from server.http.validation import by_kind
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
        """The texts to embed; none where the model is only to be loaded."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []

    def path(self, index: int) -> FieldPath:
        """The field that holds `texts()[index]`."""
        return FieldPath("input") if isinstance(self.input, str) else FieldPath("input", index)


class EmbeddingsBody(OllamaCall):
    prompt: str | None = None


endpoints = Endpoints("Ollama's API", ErrorFormat.OLLAMA)
EMBEDDINGS = with_optional(
    object_of(model=TEXT, embeddings=list_of(list_of(NUMBER))),
    total_duration=COUNT,
    load_duration=COUNT,
    prompt_eval_count=COUNT,
)


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
    name, body, ready = await read_call(request, state, EmbedBody)
    size = body.dimensions or 0
    if size > ready.hidden_size:
        raise RequestError(
            "{dimensions} is {}: the vectors of {} have {}; lower it or leave it out",
            (size, name, ready.hidden_size),
        )
    cut = None if body.truncate is False else Truncation(ready.max_model_len, "right")
    inputs = [
        EmbeddingInput(text, body.path(index), cut) for index, text in enumerate(body.texts())
    ]
    if not inputs:
        body.check_stays()
        return JsonBody(orjson.dumps({"model": name, "embeddings": []}))
    with map_error_fields({"truncate_prompt_tokens": "truncate"}):
        found, job = await _compute(request, state, body, ready, inputs, size=size)
    timing_fields = {
        "total_duration": round((time.monotonic() - began) * 1e9),
        "load_duration": round(job.waited_seconds * 1e9),
        "prompt_eval_count": job.num_tokens,
    }

    def work() -> bytes:
        rows = [decode_embedding(embedding) for embedding in found]
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
    _, body, ready = await read_call(request, state, EmbeddingsBody)
    if not body.prompt:
        body.check_stays()
        return JsonBody(b'{"embedding":[]}')
    inputs = [EmbeddingInput(body.prompt, FieldPath("prompt"))]
    with map_error_fields({"truncate_prompt_tokens": "truncate` of `/api/embed"}):
        # Its clients expect what the model gives, of whatever length.
        [found], _ = await _compute(request, state, body, ready, inputs, normalize=False)
    return JsonBody(orjson.dumps({"embedding": decode_embedding(found)}))


async def _compute(
    request: Request,
    state: ServerState,
    body: OllamaCall,
    ready: Ready,
    inputs: Sequence[EmbeddingInput],
    *,
    size: int = 0,
    normalize: bool = True,
) -> tuple[list[bytes], PoolingJob]:
    """Little-endian float32, one entry a text, and the finished job.  Raises RequestError."""
    kind = pooling_of(state.model.directory, state.config.pooling, None, "start it with --pooling")
    with reserve_prompts(state, len(inputs)) as slots:
        prompts = await tokenize_inputs(state, ready, inputs)
        pooling = PoolingParams(kind, size, normalize)
        salt = prefix_salt(request, None)
        job = PoolingJob(state, ROUTE, body.model, prompts, pooling, slots, salt=salt)
        return await while_connected(request.receive, job.collect(), job.close), job
