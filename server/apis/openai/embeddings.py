"""POST /v1/embeddings, /v1/score and /v1/rerank: what is made of the vectors of texts."""

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
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import prefix_salt
from server.http.sse import while_connected
from server.http.validation import Unsupported, parse
from server.state import ServerState, state_of

endpoints = Endpoints("vectors")

P = TypeVar("P", bound=PoolingBody)


@dataclass(frozen=True)
class EmbeddingCall(Generic[P]):
    """One request for vectors: its body, and the engine that makes them."""

    request: Request
    state: ServerState
    ready: Ready
    body: P

    def given(self, content: str | list[int], path: str, most: int | None = None) -> EmbeddingInput:
        """`content` with the request's options; `most` keeps so many tokens of its beginning."""
        body, limit = self.body, self.ready.max_model_len
        kept, side = body.truncate_prompt_tokens, body.truncation_side or "left"
        if most is not None:
            kept, side = most, "right"
        if kept is not None:
            kept = limit if kept == -1 else min(kept, limit)
        return EmbeddingInput(
            content, path, kept, side, special=body.add_special_tokens is not False
        )

    async def vectors(
        self, route: str, given: list[EmbeddingInput], *, size: int = 0, normalize: bool = True
    ) -> tuple[list[bytes], PoolingJob]:
        """Little-endian float32, one entry a text, and who made them.  Raises RequestError."""
        config = self.state.config
        kind = pooling_of(config.model_directory, config.pooling, self.body.pooling)
        with reserve_prompts(self.state, len(given)) as places:
            vectors = PoolingJob(
                self.state,
                route,
                self.body.model,
                await tokenize_inputs(self.state, self.ready, given),
                PoolingParams(kind, size, normalize),
                places,
                salt=prefix_salt(self.request, self.body.cache_salt),
                priority=self.body.priority or 0,
            )
            receive = self.request.receive
            return await while_connected(receive, vectors.collect(), vectors.close), vectors


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
            f"`dimensions` is {size}: the vectors of {body.model} have {call.ready.hidden_size}; "
            "lower it or leave it out",
            param="dimensions",
        )
    inputs = body.inputs()
    given = [call.given(text, body.path(place)) for place, text in enumerate(inputs)]
    found, vectors = await call.vectors(
        "embeddings", given, size=size, normalize=body.normalize is not False
    )
    in_base64 = body.encoding_format == "base64"

    def work() -> bytes:
        entries = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (place, _shown(vector, in_base64))
            for place, vector in enumerate(found)
        ]
        tail = orjson.dumps({"model": body.model, "usage": vectors.usage()})
        return b'{"object":"list","data":[%b],%b' % (b",".join(entries), tail[1:])

    whole = await off_loop(sum(map(len, found)) // 4, work)
    return JsonBody(whole)


def _shown(vector: bytes, in_base64: bool) -> bytes:
    if in_base64:
        return b'"%b"' % binascii.b2a_base64(vector, newline=False)
    return orjson.dumps(decode_embedding(vector))


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
    names = body.names()
    sides = [body.side(name) for name in names]
    given = [
        call.given(text, body.path(name, place))
        for name, side in zip(names, sides, strict=True)
        for place, text in enumerate(side)
    ]
    found, vectors = await call.vectors("score", given)
    ones, others = found[: len(sides[0])], found[len(sides[0]) :]
    if len(ones) == 1:
        ones = ones * len(others)
    scores = await _likeness(ones, others)
    answer: dict[str, Any] = {
        "id": f"score-{vectors.name}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ],
        "usage": vectors.usage(),
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
    given = [call.given(body.query, "query")]
    given += [
        call.given(text, body.path(place), most=body.max_tokens_per_doc)
        for place, text in enumerate(texts)
    ]
    found, vectors = await call.vectors("rerank", given)
    scores = await _likeness(found[:1] * len(texts), found[1:])
    best = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": place, "relevance_score": scores[place]} for place in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    answer: dict[str, Any] = {
        "id": f"rerank-{vectors.name}",
        "model": body.model,
        "results": results,
        "usage": vectors.usage(),
    }
    return JsonBody(orjson.dumps(answer))


async def _likeness(ones: list[bytes], others: list[bytes]) -> list[float]:
    """The cosine of the angle between vectors of length 1, pair by pair."""

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
