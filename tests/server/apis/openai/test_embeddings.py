"""Embeddings: what is sent to the engine and what callers get."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

import httpx2 as httpx
import openai
import pytest
from tokenizers import processors

from runtime.messages import EngineRequest, PoolingParams, Ready, SamplingParams
from server.errors import FieldPath
from server.generation.embeddings import MAX_CONCURRENT, EmbeddingInput
from server.generation.sampling_params import Truncation
from tests.support.server.fake_engine import (
    CONTEXT,
    HIDDEN,
    FakeEngine,
    FakeServer,
    embedding,
    fake_config,
)


def ask(fake: FakeServer, route: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{fake.url}{route}", json={"model": "fake", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(fake: FakeServer, text: Any = "The quick brown fox", **fields: Any) -> list[list[float]]:
    answer = ask(fake, "/v1/embeddings", input=text, **fields)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


def expected(fake: FakeServer, tokens: list[int], pooling: PoolingParams) -> list[float]:
    numbers = embedding(EngineRequest(0, 0, tokens, SamplingParams(0, pooling=pooling)))
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))


# Embeddings.


def test_openais_client_gets_equal_floats_from_either_encoding(fake: FakeServer):
    tokens = fake.tokenizer.encode("The quick brown fox")
    reference = expected(fake, tokens, PoolingParams("mean"))
    client, extra = fake.client(), {"pooling": "mean"}
    plain = client.embeddings.create(
        model="fake", input="The quick brown fox", encoding_format="float", extra_body=extra
    )
    # Left alone, the client asks for base64 and decodes it.
    packed = client.embeddings.create(model="fake", input="The quick brown fox", extra_body=extra)
    assert plain.data[0].embedding == packed.data[0].embedding == reference
    assert plain.object == "list" and plain.data[0].object == "embedding"
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == len(tokens)
    assert plain.model == "fake"


async def test_openais_async_client_gets_every_embedding_at_its_index(fake: FakeServer):
    texts = ["a fox", "b dog", "a fox"]
    async with fake.async_client() as client:
        answer = await client.embeddings.create(model="fake", input=texts, dimensions=5)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.data[0].embedding == answer.data[2].embedding
    assert all(len(entry.embedding) == 5 for entry in answer.data)


def test_base64_is_little_endian_float32(fake: FakeServer):
    tokens = fake.tokenizer.encode("fox")
    answer = ask(fake, "/v1/embeddings", input="fox", encoding_format="base64")
    data = base64.b64decode(answer["data"][0]["embedding"], validate=True)
    assert list(struct.unpack(f"<{HIDDEN}f", data)) == expected(fake, tokens, PoolingParams("last"))


@pytest.mark.parametrize(
    ("texts_in", "prompts"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a"], None),
        ("a", None),
        (["a", "b"], None),
    ],
)
def test_text_texts_ids_and_lists_of_ids_are_taken(fake: FakeServer, texts_in: Any, prompts: Any):
    if prompts is None:
        texts = [texts_in] if isinstance(texts_in, str) else texts_in
        prompts = [fake.tokenizer.encode(text) for text in texts]
    answer = ask(fake, "/v1/embeddings", input=texts_in)
    assert [request.tokens for request in fake.engine.requests] == prompts
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert len(answer["data"]) == len(prompts)


def test_the_engine_gets_the_pooling_and_no_sampling(fake: FakeServer):
    embed(fake, dimensions=7, normalize=False, pooling="mean", priority=3, cache_salt="s")
    [request] = fake.engine.requests
    assert request.params == SamplingParams(0, pooling=PoolingParams("mean", 7, False))
    assert (request.priority, request.salt) == (3, b"s")


def test_defaults_are_the_last_token_all_dimensions_and_length_one(fake: FakeServer):
    [found] = embed(fake, dimensions=None, normalize=None, encoding_format=None, user="me")
    assert fake.engine.requests[0].params.pooling == PoolingParams("last", 0, True)
    assert len(found) == HIDDEN and sum(number**2 for number in found) == pytest.approx(1)


def test_fewer_dimensions_are_the_first_ones_at_length_one(fake: FakeServer):
    [whole] = embed(fake, pooling="mean", normalize=False)
    [cut] = embed(fake, pooling="mean", dimensions=9)
    length = sum(number**2 for number in whole[:9]) ** 0.5
    assert cut == pytest.approx([number / length for number in whole[:9]])


def test_a_prompt_may_fill_the_whole_context(fake: FakeServer):
    embed(fake, [1] * CONTEXT)
    assert len(fake.engine.requests[0].tokens) == CONTEXT


def test_more_texts_than_the_queue_holds_are_answered_in_order(fake: FakeServer):
    found = embed(fake, [[token % 300 + 1] for token in range(2048)])
    assert len(found) == 2048 > fake_config().max_queue
    assert found[0] == expected(fake, [1], PoolingParams("last"))
    assert found[2047] == expected(fake, [2047 % 300 + 1], PoolingParams("last"))


def test_one_request_has_only_a_window_of_its_texts_in_the_engine(fake: FakeServer):
    fake.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fake.url}/v1/embeddings",
            json={"model": "fake", "input": [[1]] * 1000},
            timeout=0.5,
        )
    assert len(fake.engine.requests) == min(MAX_CONCURRENT, fake_config().max_queue)
    until_left(fake)  # else its next texts would come while another test runs


def test_a_caller_that_leaves_takes_its_prompts_along(fake: FakeServer):
    fake.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fake.url}/v1/embeddings", json={"model": "fake", "input": ["a", "b"]}, timeout=0.3
        )
    until_left(fake)
    assert sorted(fake.engine.aborted) == [1, 2]


def until_left(fake: FakeServer) -> None:
    """The server has seen that its caller is gone."""
    deadline = time.monotonic() + 10
    while fake.engine.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not fake.engine.pending


def test_a_full_queue_says_when_to_come_back(fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeEngine, "pending", property(lambda engine: 200))
    answer = httpx.post(f"{fake.url}/v1/embeddings", json={"model": "fake", "input": "a"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_fault_of_the_engine_ends_the_request_and_aborts_the_others(fake: FakeServer):
    fake.engine.fail_after = 0
    fake.engine.failing = lambda request: request.id == 2
    with pytest.raises(openai.InternalServerError, match="a seeded fault"):
        fake.client().embeddings.create(model="fake", input=["a", "b", "c"])
    assert fake.engine.pending == 0
    fake.reset()
    assert embed(fake, "a")


def test_cached_tokens_are_reported(fake: FakeServer):
    fake.engine.cached = 3
    usage = ask(fake, "/v1/embeddings", input=["The quick", "The slow"])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


def test_vectors_wait_for_the_engine(fake: FakeServer):
    was: Ready | None = fake.engine.ready
    fake.engine.ready = None
    answer = httpx.post(f"{fake.url}/v1/embeddings", json={"model": "fake", "input": "a"})
    fake.engine.ready = was
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"


def test_what_became_of_a_request_can_be_asked(fake: FakeServer):
    answer = httpx.post(f"{fake.url}/v1/embeddings", json={"model": "fake", "input": ["a", "b"]})
    record = httpx.get(f"{fake.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert (record["route"], record["state"], record["num_done"]) == ("embeddings", "finished", 2)
    assert record["usage"] == answer.json()["usage"]
    name = ask(fake, "/v1/rerank", query="fox", documents=["fox"])["id"]
    assert httpx.get(f"{fake.url}/v1/requests/{name}").json()["route"] == "rerank"


def test_failed_and_abandoned_requests_are_counted_as_such(fake: FakeServer):
    def state(name: str) -> str:
        return httpx.get(f"{fake.url}/v1/requests/{name}").json()["state"]

    body = {"model": "fake", "input": ["a", "b"]}
    fake.engine.fail_after = 0
    httpx.post(f"{fake.url}/v1/embeddings", json=body, headers={"x-request-id": "one-that-fails"})
    assert state("one-that-fails") == "failed"
    fake.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fake.url}/v1/embeddings",
            json=body,
            headers={"x-request-id": "one-that-is-left"},
            timeout=0.3,
        )
    deadline = time.monotonic() + 5
    while state("one-that-is-left") == "running" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state("one-that-is-left") == "aborted"


# Truncation.


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))]
)
@pytest.mark.parametrize("texts_in", ["The quick brown fox jumps", [5, 6, 7, 8, 9]])
def test_truncation_cuts_on_the_side_that_was_named(
    fake: FakeServer, texts_in: Any, side: str | None, kept: slice
):
    tokens = fake.tokenizer.encode(texts_in) if isinstance(texts_in, str) else texts_in
    options = {} if side is None else {"truncation_side": side}
    embed(fake, texts_in, truncate_prompt_tokens=3, **options)
    assert fake.engine.requests[0].tokens == tokens[kept]


def test_minus_one_keeps_what_fits(fake: FakeServer):
    embed(fake, "Hello, world! " * 50_000, truncate_prompt_tokens=-1)
    assert len(fake.engine.requests[0].tokens) == CONTEXT


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_text_keeps_the_token_that_ends_it(fake: FakeServer, side: Any):
    tokenizer = fake.tokenizer.tokenizer
    text, whole = "The quick brown fox", fake.tokenizer.encode("The quick brown fox")
    before = tokenizer.post_processor
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 0)]
    )
    try:
        assert EmbeddingInput(text, FieldPath("input")).tokens(fake.tokenizer) == [*whole, 0]
        cut = EmbeddingInput(text, FieldPath("input"), Truncation(2, side)).tokens(fake.tokenizer)
        assert cut == [whole[-1] if side == "left" else whole[0], 0]
        assert (
            EmbeddingInput(text, FieldPath("input"), Truncation(2, side), special=False).tokens(
                fake.tokenizer
            )[-1]
            != 0
        )
    finally:
        tokenizer.post_processor = before
