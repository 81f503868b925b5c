"""Embeddings of the built-in model through the real server, among generated answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2 as httpx
import ollama
import pytest
from openai import AsyncOpenAI

from tests.support.server.server_process import Server

TEXTS = ["The capital of France is Paris.", "Two and two are four.", "Good morning!"]
TIMES = 40


def likeness(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_text_has_one_embedding_alone_in_a_batch_and_in_either_encoding(
    server: Server, pooling: str
):
    client, extra = server.client(), {"pooling": pooling}
    alone = [
        client.embeddings.create(
            model="tiny-chat", input=text, encoding_format="float", extra_body=extra
        )
        .data[0]
        .embedding
        for text in TEXTS
    ]
    together = client.embeddings.create(model="tiny-chat", input=TEXTS * TIMES, extra_body=extra)
    assert len(together.data) == len(TEXTS) * TIMES
    for entry in together.data:
        assert likeness(entry.embedding, alone[entry.index % len(TEXTS)]) > 0.999
    assert likeness(alone[0], alone[1]) < 0.999
    assert likeness(alone[0], alone[0]) == pytest.approx(1, abs=1e-5)


def test_ollamas_route_gives_the_same_embeddings(server: Server):
    made = server.client().embeddings.create(model="tiny-chat", input=TEXTS, dimensions=64)
    with ollama.Client(server.url) as client:
        answer = client.embed("tiny-chat", TEXTS, dimensions=64)
    for one, other in zip(made.data, answer.embeddings, strict=True):
        assert likeness(one.embedding, list(other)) == pytest.approx(1, abs=1e-3)
    assert answer.prompt_eval_count == made.usage.prompt_tokens


async def test_answers_go_on_while_embeddings_are_computed(server: Server):
    async def answer(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": "Count to 5."}],
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with server.async_client() as client:
        vectors = client.embeddings.create(model="tiny-chat", input=TEXTS * TIMES)
        said, made = await asyncio.gather(answer(client), vectors)
    assert "1, 2, 3, 4, 5" in said
    assert len(made.data) == len(TEXTS) * TIMES


def test_rerank_and_score_agree_and_put_the_text_itself_first(server: Server):
    body = {"model": "tiny-chat", "query": TEXTS[0], "documents": [TEXTS[1], TEXTS[0], TEXTS[2]]}
    ranked = httpx.post(f"{server.url}/v1/rerank", json=body).json()["results"]
    assert ranked[0]["index"] == 1 and ranked[0]["relevance_score"] == pytest.approx(1, abs=1e-4)
    body = {"model": "tiny-chat", "text_1": TEXTS[0], "text_2": body["documents"]}
    scored = httpx.post(f"{server.url}/score", json=body).json()["data"]
    scores = [entry["score"] for entry in scored]
    for result in ranked:
        assert scores[result["index"]] == pytest.approx(result["relevance_score"], abs=1e-3)


def test_a_caller_that_leaves_frees_the_engine(server: Server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/embeddings",
            json={"model": "tiny-chat", "input": [TEXTS[0] * 20] * 2048},
            timeout=0.5,
        )
    server.wait_until(lambda: server.metric("wavefill_requests_running") == 0)
    assert server.metric("wavefill_kv_cache_usage_ratio") == 0


def test_the_operator_chooses_the_pooling(own_server: Callable[..., Server]):
    client = own_server("--pooling", "mean", "--dtype", "float32").client()

    def vector(**options: object) -> list[float]:
        answer = client.embeddings.create(model="tiny-chat", input=TEXTS[0], extra_body=options)
        return answer.data[0].embedding

    default, mean, last = vector(), vector(pooling="mean"), vector(pooling="last")
    assert likeness(default, mean) > 0.99999
    assert likeness(default, last) < 0.999
