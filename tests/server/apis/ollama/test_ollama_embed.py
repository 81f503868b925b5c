"""Ollama's /api/embed and /api/embeddings, by its own client."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ollama
import pytest
from msgspec.structs import replace

from runtime.messages import EngineRequest, PoolingParams, SamplingParams
from tests.support.server.fake_engine import CONTEXT, HIDDEN, FakeServer, embedding

TEXT = "The quick brown fox"


@pytest.fixture
def client(fake: FakeServer) -> Iterator[ollama.Client]:
    with ollama.Client(fake.url) as client:
        yield client


def expected(tokens: list[int], pooling: PoolingParams) -> list[float]:
    numbers = embedding(EngineRequest(0, 0, tokens, SamplingParams(0, pooling=pooling)))
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))


def lengths(fake: FakeServer) -> list[int]:
    return [len(request.tokens) for request in fake.engine.requests]


def test_texts_become_embeddings_of_length_one(fake: FakeServer, client: ollama.Client):
    texts = [TEXT, "jumps"]
    answer = client.embed("fake:latest", texts)
    prompts = [fake.tokenizer.encode(text) for text in texts]
    assert answer.embeddings == [expected(prompt, PoolingParams("last")) for prompt in prompts]
    assert answer.model == "fake:latest"
    assert answer.prompt_eval_count == sum(map(len, prompts))
    assert client.embed("fake", TEXT).embeddings == answer.embeddings[:1]


def test_fewer_dimensions_are_the_first_ones(fake: FakeServer, client: ollama.Client):
    [found] = client.embed("fake", TEXT, dimensions=5).embeddings
    assert found == expected(fake.tokenizer.encode(TEXT), PoolingParams("last", 5))
    [whole] = client.embed("fake", TEXT, dimensions=0).embeddings
    assert len(whole) == HIDDEN


@pytest.mark.parametrize(("options", "kept"), [({}, CONTEXT), ({"num_ctx": 3}, 3)])
def test_a_text_that_is_too_long_keeps_its_beginning(
    fake: FakeServer, client: ollama.Client, options: dict[str, Any], kept: int
):
    text = "The quick brown fox " * 100
    answer = client.embed("fake", [text, TEXT[:3]], options=options)
    assert fake.engine.requests[0].tokens == fake.tokenizer.encode(text)[:kept]
    assert answer.prompt_eval_count == sum(lengths(fake))
    with pytest.raises(ollama.ResponseError, match=f"maximum context length is {kept} tokens"):
        client.embed("fake", text, truncate=False, options=options)


def test_the_durations_are_nanoseconds_of_this_request(
    fake: FakeServer, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
):
    outputs = fake.engine._outputs
    monkeypatch.setattr(
        fake.engine,
        "_outputs",
        lambda request: (replace(out, started=time.monotonic()) for out in outputs(request)),
    )
    began = time.monotonic()
    answer = client.embed("fake", TEXT)
    measured = (time.monotonic() - began) * 1e9
    assert answer.total_duration and answer.load_duration
    assert 0 < answer.load_duration <= answer.total_duration <= measured


@pytest.mark.parametrize("nothing", ["", []])
def test_without_a_text_the_model_is_said_to_be_loaded(
    fake: FakeServer, client: ollama.Client, nothing: str | Sequence[str]
):
    assert client.embed("fake", nothing).embeddings == []
    assert client.embeddings("fake").embedding == []
    assert fake.engine.requests == []


def test_the_older_route_gives_one_embedding_as_the_model_does(
    fake: FakeServer, client: ollama.Client
):
    found = client.embeddings("fake", TEXT).embedding
    tokens = fake.tokenizer.encode(TEXT)
    assert found == expected(tokens, PoolingParams("last", normalize=False))


def test_a_failure_of_the_engine_is_reported_in_ollamas_form(
    fake: FakeServer, client: ollama.Client
):
    fake.engine.fail_after = 0
    with pytest.raises(
        ollama.ResponseError, match="no embedding was computed: a seeded fault"
    ) as failed:
        client.embed("fake", [TEXT, TEXT])
    assert failed.value.status_code == 500 and fake.engine.num_open == 0
