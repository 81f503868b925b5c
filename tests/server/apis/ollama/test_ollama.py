"""Ollama's routes through its own client, and line by line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import ollama
import pytest
from msgspec.structs import replace

from tests.support.server import fake_engine
from tests.support.server.fake_engine import CONTEXT, GREETING, FakeServer, fake_server

HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def client(fake: FakeServer) -> Iterator[ollama.Client]:
    with ollama.Client(fake.url) as client:
        yield client


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def test_a_chat_answer_has_every_field_of_ollamas(fake: FakeServer, client: ollama.Client):
    answer = client.chat(**HELLO)
    assert answer.model == "fake" and answer.created_at
    assert (answer.message.role, answer.message.content) == ("assistant", GREETING)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(fake.engine.requests[-1].tokens)
    assert answer.eval_count == len(fake.tokenizer.encode(GREETING)) + 1


def test_the_durations_are_nanoseconds_of_this_request(
    fake: FakeServer, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
):
    submit = fake.engine.submit

    def submit_now(*args: Any, **options: Any):
        mailbox = submit(*args, **options)
        mailbox.request = replace(mailbox.request, arrived=time.monotonic())
        return mailbox

    monkeypatch.setattr(fake.engine, "submit", submit_now)
    fake.engine.delay = 0.002
    began = time.monotonic()
    answer = client.chat(**HELLO)
    measured = (time.monotonic() - began) * 1e9
    parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(part is not None and part >= 0 for part in parts)
    assert answer.total_duration and answer.eval_count and answer.eval_duration
    assert sum(parts) <= answer.total_duration + 3 and answer.total_duration <= measured
    assert answer.eval_duration >= (answer.eval_count - 1) * 2e6


def test_a_stream_spells_the_answer_and_ends_with_the_figures(client: ollama.Client):
    lines = list(client.chat(**HELLO, stream=True))
    assert len(lines) > 5
    assert "".join(line.message.content or "" for line in lines) == GREETING
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count and lines[0].eval_count is None


def test_without_being_asked_an_answer_is_a_stream_of_lines(fake: FakeServer):
    answer = httpx.post(f"{fake.url}/api/chat", json=HELLO)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == GREETING
    assert answer.text.endswith("}\n") and lines[-1]["done_reason"] == "stop"


def test_a_generated_answer_goes_through_the_template(fake: FakeServer, client: ollama.Client):
    answer = client.generate("fake", "Hello", system="be brief")
    assert answer.response == GREETING
    assert prompt_of(fake) == "<|system|>be brief<|end|><|user|>Hello<|end|><|assistant|>"


def test_raw_text_goes_to_the_model_as_it_is(fake: FakeServer, client: ollama.Client):
    answer = client.generate("fake", "<|user|>Hello", raw=True)
    assert (answer.response, prompt_of(fake)) == (GREETING, "<|user|>Hello")
    assert fake.engine.requests[-1].params.max_tokens == CONTEXT - answer.prompt_eval_count
    lines = list(client.generate("fake", "Hello", raw=True, stream=True))
    assert "".join(line.response for line in lines) == GREETING and lines[-1].done


def test_the_name_may_carry_the_tag_latest(client: ollama.Client):
    assert client.chat(**HELLO | {"model": "fake:latest"}).model == "fake:latest"
    assert client.show("alias:latest").details


def test_the_options_reach_the_engine(fake: FakeServer, client: ollama.Client):
    options = {
        "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "seed": 3,
        "num_predict": 11, "repeat_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.75, "num_ctx": CONTEXT, "num_gpu": 1, "mirostat": 0,
    }  # fmt: skip
    client.chat(**HELLO, options=options)
    params = fake.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 7, 0.5, 0.125)
    assert (params.seed, params.max_tokens, params.repetition_penalty) == (3, 11, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.75)


@pytest.mark.parametrize("endless", [-1, -2])
def test_without_a_limit_an_answer_may_fill_the_context(
    fake: FakeServer, client: ollama.Client, endless: int
):
    client.chat(**HELLO, options={"num_predict": endless, "seed": -1})
    request = fake.engine.requests[-1]
    assert request.params.max_tokens == CONTEXT - len(request.tokens)
    assert request.params.seed is None


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [({"num_predict": 1}, "length", "Hello"), ({"stop": ["w"]}, "stop", "Hello, ")],
)
def test_why_an_answer_ended(
    client: ollama.Client, options: dict[str, Any], reason: str, text: str
):
    answer = client.generate("fake", "x", options=options)
    assert (answer.done_reason, answer.response) == (reason, text)
    last = list(client.generate("fake", "x", options=options, stream=True))[-1]
    assert last.done_reason == reason


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_ends_where_the_context_does(fake: FakeServer, client: ollama.Client, raw: bool):
    fake.say("x" * 300, end=False)
    answer = client.generate("fake", "Hello", raw=raw, options={"num_predict": 10**6})
    assert answer.done_reason == "length"
    assert (answer.prompt_eval_count or 0) + (answer.eval_count or 0) == CONTEXT


def test_log_probabilities_are_those_of_the_tokens(fake: FakeServer, client: ollama.Client):
    tokens = len(fake.tokenizer.encode(GREETING)) + 1  # the last one ends the answer
    whole = client.chat(**HELLO, logprobs=True, top_logprobs=2).logprobs
    assert whole and len(whole) == tokens
    assert [len(entry.top_logprobs) for entry in whole] == [2] * tokens
    lines = list(client.chat(**HELLO, logprobs=True, top_logprobs=2, stream=True))
    assert [entry for line in lines for entry in line.logprobs or ()] == whole


def test_without_a_prompt_the_model_is_said_to_be_loaded(fake: FakeServer, client: ollama.Client):
    before = len(fake.engine.requests)
    assert client.generate("fake").done_reason == "load"
    assert client.chat("fake", [], keep_alive="5m").done_reason == "load"
    assert [line.done for line in client.chat("fake", [], stream=True)] == [True]
    assert len(fake.engine.requests) == before


def test_a_conversation_goes_through_the_template(fake: FakeServer, client: ollama.Client):
    turns = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    client.chat("fake", [{"role": role, "content": text} for role, text in turns])
    assert prompt_of(fake) == (
        "<|system|>a<|end|><|user|>b<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    )


def test_an_answer_goes_on_from_a_last_message_of_the_assistant(
    fake: FakeServer, client: ollama.Client
):
    client.chat("fake", [*HELLO["messages"], {"role": "assistant", "content": "It is"}])
    assert prompt_of(fake) == "<|user|>Hello<|end|><|assistant|>It is"


def test_the_models_are_listed_and_described(fake: FakeServer, client: ollama.Client):
    assert [entry.model for entry in client.list().models] == ["fake:latest", "alias:latest"]
    shown = client.show("fake")
    assert shown.modelinfo == {
        "general.architecture": "fake",
        "fake.context_length": CONTEXT,
        "fake.vocab_size": fake_engine.VOCAB,
    }
    assert shown.capabilities == ["completion"] and shown.template == fake_engine.TEMPLATE
    assert [entry.context_length for entry in client.ps().models] == [CONTEXT, CONTEXT]
    fake.engine.ready = None
    assert client.ps().models == [] and len(client.list().models) == 2


def test_a_failure_in_a_stream_is_its_last_line(fake: FakeServer, client: ollama.Client):
    fake.engine.fail_after = 3
    lines = httpx.post(f"{fake.url}/api/chat", json=HELLO).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "the answer was cut off: a seeded fault"}
    with pytest.raises(ollama.ResponseError, match="a seeded fault"):
        list(client.chat(**HELLO, stream=True))


def test_a_failure_before_the_first_line_has_its_own_status(
    fake: FakeServer, client: ollama.Client
):
    fake.engine.fail_after = 0
    with pytest.raises(ollama.ResponseError, match="a seeded fault") as failed:
        client.chat(**HELLO)
    assert failed.value.status_code == 500


def test_a_closed_stream_ends_the_request(fake: FakeServer):
    fake.engine.delay = 0.02
    with httpx.stream("POST", f"{fake.url}/api/chat", json=HELLO) as stream:
        next(stream.iter_lines())
    asked = fake.engine.requests[-1].id
    for _ in range(100):
        if asked in fake.engine.aborted:
            return
        httpx.get(f"{fake.url}/health")
    raise AssertionError("the request was not aborted")


def test_no_content_type_is_needed_and_a_foreign_page_is_refused(fake: FakeServer):
    body = json.dumps(HELLO | {"stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in ({}, form):
        assert httpx.post(f"{fake.url}/api/chat", content=body, headers=headers).status_code == 200
    page = form | {"origin": "http://example.org"}
    answer = httpx.post(f"{fake.url}/api/chat", content=body, headers=page)
    assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]


def test_what_stands_before_the_route_answers_in_the_same_form(tmp_path: Path):
    with fake_server(tmp_path, api_keys=("right",), max_body_bytes=2000) as guarded:
        with ollama.Client(guarded.url) as client:
            with pytest.raises(ollama.ResponseError) as refused:
                client.list()
            assert refused.value.status_code == 401 and "API key" in refused.value.error
        with ollama.Client(guarded.url, headers={"authorization": "Bearer right"}) as client:
            assert client.list().models
            with pytest.raises(ollama.ResponseError) as refused:
                client.generate("fake", "x" * 3000)
            assert refused.value.status_code == 413 and "2000 bytes" in refused.value.error
