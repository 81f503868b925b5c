"""POST /v1/embeddings, /v1/score and /v1/rerank: the embeddings of texts and their similarity."""

from __future__ import annotations

import binascii
import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any, Generic, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import PoolingParams, Ready
from server.apis.openai.answer_schema import EMBEDDINGS, RANKING, SCORES
from server.apis.openai.embeddings_schema import (
    EMBEDDING_UNSUPPORTED,
    RERANK_UNSUPPORTED,
    SCORE_UNSUPPORTED,
    EmbeddingRequest,
    PoolingBody,
    RerankRequest,
    ScoreRequest,
)
from server.errors import FieldPath, RequestError
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
from server.generation.sampling_params import Truncation
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import prefix_salt
from server.http.sse import while_connected
from server.http.validation import Unsupported, parse
from server.state import ServerState, state_of

endpoints = Endpoints("embeddings")

P = TypeVar("P", bound=PoolingBody)


@dataclass(frozen=True)
class EmbeddingCall(Generic[P]):
    """One request for embeddings: its body, and the engine that computes them."""

    request: Request
    state: ServerState
    ready: Ready
    body: P

    def inputs(
        self, contents: Mapping[FieldPath, str | list[int]], first_tokens: int | None = None
    ) -> list[EmbeddingInput]:
        """Texts and token ids by their paths, with the request's options.

        first_tokens  truncate to so many, in place of the request's `truncate_prompt_tokens`
        """
        body, limit = self.body, self.ready.max_model_len
        kept, side = body.truncate_prompt_tokens, body.truncation_side or "left"
        if first_tokens is not None:
            kept, side = first_tokens, "right"
        cut = None
        if kept is not None:
            cut = Truncation(limit if kept == -1 else min(kept, limit), side)
        special = body.add_special_tokens is not False
        return [EmbeddingInput(content, path, cut, special) for path, content in contents.items()]

    async def embed(
        self, route: str, inputs: list[EmbeddingInput], *, size: int = 0, normalize: bool = True
    ) -> tuple[list[bytes], PoolingJob]:
        """Embeddings in little-endian float32, and the job that computed them.

        Raises RequestError.
        """
        model, config = self.state.model, self.state.config
        kind = pooling_of(model.directory, config.pooling, self.body.pooling)
        with reserve_prompts(self.state, len(inputs)) as slots:
            job = PoolingJob(
                self.state,
                route,
                self.body.model,
                await tokenize_inputs(self.state, self.ready, inputs),
                PoolingParams(kind, size, normalize),
                slots,
                salt=prefix_salt(self.request, self.body.cache_salt),
                priority=self.body.priority or 0,
            )
            return await while_connected(self.request.receive, job.collect(), job.close), job


async def read_call(
    request: Request, kind: type[P], unsupported: Mapping[str, Unsupported]
) -> EmbeddingCall[P]:
    """The checked body of a request.  Raises RequestError."""

    def checked(fields: dict[str, Any]) -> P:
        body = parse(kind, fields, unsupported)
        body.check()
        return body

    body = await read_checked(request, checked)
    state = state_of(request)
    state.check_model(body.model)
    return EmbeddingCall(request, state, require_ready(state), body)


@endpoints.post(
    "/v1/embeddings",
    summary="Texts to vectors",
    body=EmbeddingRequest,
    example={"input": ["the first text", "the second"]},
    answer=EMBEDDINGS,
)
async def embeddings(request: Request) -> Response:
    call = await read_call(request, EmbeddingRequest, EMBEDDING_UNSUPPORTED)
    body = call.body
    size = body.dimensions or 0
    if size > call.ready.hidden_size:
        raise RequestError(
            "{dimensions} is {}: the vectors of {} have {}; lower it or leave it out",
            (size, body.model, call.ready.hidden_size),
        )
    found, job = await call.embed(
        "embeddings", call.inputs(body.inputs()), size=size, normalize=body.normalize is not False
    )

    def to_json(embedding: bytes) -> bytes:
        if body.encoding_format == "base64":
            return b'"%b"' % binascii.b2a_base64(embedding, newline=False)
        return orjson.dumps(decode_embedding(embedding))

    def work() -> bytes:
        entries = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, to_json(embedding))
            for index, embedding in enumerate(found)
        ]
        tail = orjson.dumps({"model": body.model, "usage": job.usage()})
        return b'{"object":"list","data":[%b],%b' % (b",".join(entries), tail[1:])

    return JsonBody(await off_loop(sum(map(len, found)) // 4, work))


@endpoints.post(
    "/v1/score",
    summary="How alike pairs of texts are",
    aliases=["/score"],
    body=ScoreRequest,
    example={"text_1": "a cat", "text_2": ["a dog", "a house"]},
    answer=SCORES,
)
async def score(request: Request) -> Response:
    call = await read_call(request, ScoreRequest, SCORE_UNSUPPORTED)
    body = call.body
    first, second = [body.side(name) for name in body.names()]
    found, job = await call.embed("score", call.inputs(first | second))
    ones, others = found[: len(first)], found[len(first) :]
    if len(ones) == 1:
        ones = ones * len(others)
    scores = await _cosines(ones, others)
    answer: dict[str, Any] = {
        "id": f"score-{job.name}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ],
        "usage": job.usage(),
    }
    return JsonBody(orjson.dumps(answer))


@endpoints.post(
    "/v1/rerank",
    summary="Documents, the one most like the query first",
    aliases=["/rerank", "/v2/rerank"],
    body=RerankRequest,
    example={"query": "a cat", "documents": ["a dog", "a house"]},
    answer=RANKING,
)
async def rerank(request: Request) -> Response:
    call = await read_call(request, RerankRequest, RERANK_UNSUPPORTED)
    body = call.body
    texts = body.texts()
    inputs = call.inputs({FieldPath("query"): body.query}) + call.inputs(
        texts, body.max_tokens_per_doc
    )
    found, job = await call.embed("rerank", inputs)
    scores = await _cosines(found[:1] * len(texts), found[1:])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in enumerate(scores)
    ]
    if body.return_documents is not False:
        for result, text in zip(results, texts.values(), strict=True):
            result["document"] = {"text": text}
    results.sort(key=lambda result: -result["relevance_score"])
    answer: dict[str, Any] = {
        "id": f"rerank-{job.name}",
        "model": body.model,
        "results": results[: body.top_n or None],
        "usage": job.usage(),
    }
    return JsonBody(orjson.dumps(answer))


async def _cosines(ones: list[bytes], others: list[bytes]) -> list[float]:
    """The cosine of the angle between embeddings of length 1, pair by pair."""

    def work() -> list[float]:
        last, numbers = b"", decode_embedding(b"")
        scores: list[float] = []
        for one, other in zip(ones, others, strict=True):
            if one is not last:  # the query of a rerank, in every pair
                last, numbers = one, decode_embedding(one)
            cosine = sum(map(mul, numbers, decode_embedding(other)))
            scores.append(min(1.0, max(-1.0, cosine)))
        return scores

    return await off_loop(sum(map(len, others)) // 4, work)
