"""/v1/messages through Anthropic's own client, and byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import CONTEXT, GREETING, FakeServer, fake_server

HELLO: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Hello"}],
}


def client_of(fake: FakeServer, key: str = "none") -> anthropic.Anthropic:
    return fake.closing(anthropic.Anthropic(base_url=fake.url, api_key=key, max_retries=0))


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def events_of(fake: FakeServer, **changes: object) -> list[dict[str, Any]]:
    answer = httpx.post(f"{fake.url}/v1/messages", json={**HELLO, "stream": True, **changes})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_an_answer_has_every_field_of_anthropics(fake: FakeServer):
    fake.engine.cached = 2
    message = client_of(fake).messages.create(**HELLO)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert message.id.startswith("msg_") and message._request_id
    assert [(block.type, block.text) for block in message.content] == [("text", GREETING)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    prompt = len(fake.engine.requests[-1].tokens)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 2, 2)
    assert usage.cache_creation_input_tokens == 0
    assert usage.output_tokens == len(fake.tokenizer.encode(GREETING)) + 1


def test_a_stream_is_the_same_message_in_events(fake: FakeServer):
    plain = client_of(fake).messages.create(**HELLO)
    with client_of(fake).messages.stream(**HELLO) as stream:
        streamed = stream.get_final_message()
    same = {"stop_reason", "stop_sequence", "usage", "role", "model"}
    assert streamed.model_dump(include=same) == plain.model_dump(include=same)
    assert streamed.content[0].text == plain.content[0].text == GREETING


def test_the_events_come_in_anthropics_order(fake: FakeServer):
    events = events_of(fake)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 5
    assert kinds == [
        *("message_start", "content_block_start", "ping"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > start["usage"]["output_tokens"]


def test_an_empty_answer_has_no_blocks(fake: FakeServer):
    fake.say("")
    assert client_of(fake).messages.create(**HELLO).content == []
    kinds = [event["type"] for event in events_of(fake)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nothing", "Bye"]}, "stop_sequence", "Bye"),
    ],
)
def test_why_an_answer_ended(
    fake: FakeServer, changes: dict[str, Any], reason: str, sequence: str | None
):
    message = client_of(fake).messages.create(**HELLO | changes)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert events_of(fake, **changes)[-2]["delta"] == {
        "stop_reason": reason,
        "stop_sequence": sequence,
    }
    assert "Bye" not in message.content[0].text or sequence is None


def test_an_answer_that_fills_the_context_says_so(fake: FakeServer):
    fake.say("x" * 300, end=False)
    message = client_of(fake).messages.create(**HELLO | {"max_tokens": 10000})
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == CONTEXT
    delta = events_of(fake, max_tokens=10000)[-2]["delta"]
    assert delta["stop_reason"] == "model_context_window_exceeded"


def test_the_turns_go_through_the_template(fake: FakeServer):
    client_of(fake).messages.create(
        **HELLO
        | {
            "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
                       {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "c", "citations": None},
                ]},
                {"role": "user", "content": "d"},
            ],
        }
    )  # fmt: skip
    assert prompt_of(fake) == (
        "<|system|>be\nbrief<|end|><|user|>a\n\nb<|end|><|assistant|>c<|end|>"
        "<|user|>d<|end|><|assistant|>"
    )


def test_an_answer_goes_on_from_a_last_message_of_the_assistant(fake: FakeServer):
    prefill = [*HELLO["messages"], {"role": "assistant", "content": "It is"}]
    client_of(fake).messages.create(**HELLO | {"messages": prefill})
    assert prompt_of(fake) == "<|user|>Hello<|end|><|assistant|>It is"


def test_an_answer_can_be_sent_back_as_it_came(fake: FakeServer):
    client = client_of(fake)
    message = client.messages.create(**HELLO)
    turns = [*HELLO["messages"], {"role": "assistant", "content": message.content}]
    client.messages.create(**HELLO | {"messages": [*turns, {"role": "user", "content": "x"}]})
    assert f"<|assistant|>{GREETING}<|end|><|user|>x" in prompt_of(fake)


def test_the_sampling_parameters_reach_the_engine(fake: FakeServer):
    sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}  # no longer in the client's types
    client_of(fake).messages.create(**HELLO, extra_body=sampling)
    params = fake.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert params.max_tokens == 50


def test_the_count_is_that_of_the_prompt(fake: FakeServer):
    body = {key: value for key, value in HELLO.items() if key != "max_tokens"}
    client = client_of(fake)
    counted = client.messages.count_tokens(**body, system="be brief").input_tokens
    client.messages.create(**HELLO, system="be brief")
    assert counted == len(fake.engine.requests[-1].tokens)


def test_a_failure_in_a_stream_is_an_error_event(fake: FakeServer):
    fake.engine.fail_after = 3
    last = events_of(fake)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "a seeded fault" in last["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="a seeded fault"):
        list(client_of(fake).messages.create(**HELLO, stream=True))


def test_a_failure_before_the_stream_has_its_own_status(fake: FakeServer):
    fake.engine.fail_after = 0
    with pytest.raises(anthropic.InternalServerError, match="a seeded fault") as failed:
        client_of(fake).messages.create(**HELLO, stream=True)
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_a_closed_stream_ends_the_request(fake: FakeServer):
    fake.engine.delay = 0.02
    with client_of(fake).messages.stream(**HELLO) as stream:
        next(iter(stream))
    asked = fake.engine.requests[-1].id
    for _ in range(100):
        if asked in fake.engine.aborted:
            return
        httpx.get(f"{fake.url}/health")
    raise AssertionError("the request was not aborted")


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(fake: FakeServer):
    words = r"'prompt is too long: \d+ tokens > 255 maximum"
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        client_of(fake).messages.create(**HELLO, system="x" * 400)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id


def test_a_server_that_loads_is_overloaded(fake: FakeServer):
    fake.engine.ready = None
    with pytest.raises(anthropic.APIStatusError, match="not loaded") as refused:
        client_of(fake).messages.create(**HELLO)
    assert refused.value.status_code == 503
    assert refused.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert refused.value.response.headers["retry-after"] == "2"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[FakeServer]:
    limits = {"api_keys": ("right",), "max_body_bytes": 2000, "max_header_bytes": 4000}
    with fake_server(tmp_path, allowed_origins=("http://own",), **limits) as server:
        yield server


def test_what_stands_before_the_route_answers_in_the_same_form(guarded: FakeServer):
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client_of(guarded, "wrong").messages.create(**HELLO)
    assert refused.value.type == "authentication_error"
    long = HELLO | {"system": "x" * 3000}
    with pytest.raises(anthropic.RequestTooLargeError) as refused:
        client_of(guarded, "right").messages.create(**long)
    assert refused.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    preflight = {"origin": "http://foreign", "access-control-request-method": "POST"}
    answer = httpx.options(f"{guarded.url}/v1/messages", headers=preflight)
    assert answer.status_code == 400 and answer.text == "Disallowed CORS origin"
    assert client_of(guarded, "right").messages.create(**HELLO).content
    bearer = anthropic.Anthropic(base_url=guarded.url, auth_token="right", max_retries=0)
    assert guarded.closing(bearer).messages.create(**HELLO).content
