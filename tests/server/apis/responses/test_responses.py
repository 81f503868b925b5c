"""The Responses API through the real client, on a scripted engine."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.fake_engine import GREETING, FakeEngine, FakeServer

HELLO: dict[str, Any] = {"model": "fake", "input": "Hello"}
LOGPROBS = "message.output_text.logprobs"


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def frames(fake: FakeServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose lines have exactly OpenAI's form."""
    answer = httpx.post(f"{fake.url}/v1/responses", json={**HELLO, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found: list[dict[str, Any]] = []
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == "", "the stream ends with a whole event and nothing after it"
    for number, block in enumerate(blocks):
        event, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert event == f"event: {fields['type']}"
        assert fields["sequence_number"] == number
        found.append(fields)
    return found


def test_an_answer_has_every_field_of_openais(fake: FakeServer):
    answer = fake.client().responses.create(**HELLO)
    assert (answer.object, answer.model, answer.status) == ("response", "fake", "completed")
    assert answer.id.startswith("resp_") and answer.created_at > 1_700_000_000
    assert answer.completed_at and answer.completed_at >= answer.created_at
    assert answer.output_text == GREETING
    [item] = answer.output
    assert item.type == "message" and item.id.startswith("msg_")
    assert (item.role, item.status) == ("assistant", "completed")
    assert (answer.error, answer.incomplete_details, answer.instructions) == (None, None, None)
    assert (answer.temperature, answer.top_p, answer.tool_choice) == (1.0, 1.0, "auto")
    assert (answer.tools, answer.metadata, answer.truncation) == ([], {}, "disabled")
    assert answer.text and answer.text.format and answer.text.format.type == "text"
    usage = answer.usage
    assert usage and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == len(fake.tokenizer.encode(GREETING)) + 1
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_the_response_repeats_the_parameters_of_the_request(fake: FakeServer):
    answer = fake.client().responses.create(
        **HELLO,
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=32,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
    )
    assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "u")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.25, 32)
    assert (answer.safety_identifier, answer.prompt_cache_key) == ("s", "k")
    params = fake.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 32)


def test_the_prompt_is_instructions_then_items_in_order(fake: FakeServer):
    fake.client().responses.create(
        model="fake",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "one"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
        ],
    )
    assert prompt_of(fake) == (
        "<|system|>Be brief.<|end|><|user|>one<|end|><|assistant|>two<|end|>"
        "<|user|>three<|end|><|assistant|>"
    )


def test_the_items_of_an_answer_may_be_sent_back_as_they_are(fake: FakeServer):
    first = fake.client().responses.create(**HELLO)
    items = [item.model_dump() for item in first.output]
    fake.client().responses.create(
        model="fake", input=[{"role": "user", "content": "Hello"}, *items]
    )
    assert prompt_of(fake) == f"<|user|>Hello<|end|><|assistant|>{GREETING}<|end|><|assistant|>"


def test_a_stream_is_exactly_these_events(fake: FakeServer):
    fake.say("Hello, ")
    events = frames(fake, {})
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    id = events[2]["item"]["id"]
    where = {"item_id": id, "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {"id": id, "type": "message", "role": "assistant"}
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2] == {
        "type": "response.output_item.added",
        "sequence_number": 2,
        "output_index": 0,
        "item": message | {"status": "in_progress", "content": []},
    }
    assert events[3] == {
        "type": "response.content_part.added",
        "sequence_number": 3,
        "part": part,
        **where,
    }
    assert events[4] == {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        "delta": events[4]["delta"],
        "logprobs": [],
        **where,
    }
    text = "".join(event["delta"] for event in events[4 : 4 + deltas])
    done, part_done, item_done, completed = events[4 + deltas :]
    assert text == "Hello, "
    assert done["text"] == text and done["logprobs"] == []
    assert part_done["part"] == part | {"text": text}
    item = message | {"status": "completed", "content": [part | {"text": text}]}
    assert item_done["item"] == item
    assert completed["response"]["output"] == [item]
    assert completed["response"]["usage"]["output_tokens"] > 0


def test_the_clients_own_accumulation_ends_in_the_same_response(fake: FakeServer):
    with fake.client().responses.stream(**HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == GREETING


async def test_the_async_client_streams_too(fake: FakeServer):
    async with fake.async_client() as client:
        stream = await client.responses.create(**HELLO, stream=True)
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == GREETING


def test_an_answer_that_was_cut_is_incomplete_streamed_or_not(fake: FakeServer):
    answer = fake.client().responses.create(**HELLO, max_output_tokens=2)
    assert answer.status == "incomplete" and answer.completed_at is None
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    [item] = answer.output
    assert item.type == "message" and item.status == "incomplete"
    events = frames(fake, {"max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message(fake: FakeServer):
    fake.say("")
    answer = fake.client().responses.create(**HELLO)
    assert answer.output_text == "" and len(answer.output) == 1
    kinds = [event["type"] for event in frames(fake, {})]
    assert "response.output_text.delta" not in kinds
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_log_probabilities_are_sent_where_include_names_them(fake: FakeServer):
    asked: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 2}
    answer = fake.client().responses.create(**HELLO, **asked)
    [item] = answer.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text" and part.logprobs
    assert len(part.logprobs) == answer.usage.output_tokens  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    raw = b"".join(bytes(entry.bytes) for entry in part.logprobs)
    assert raw.decode() == f"{GREETING}<|end|>"
    events = frames(fake, asked)
    streamed = [e for event in events if event["type"].endswith("delta") for e in event["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert "".join(chr(b) for e in streamed for b in e["bytes"]).encode("latin-1") == raw
    assert done["logprobs"] == streamed


def test_an_engine_failure_ends_a_stream_with_response_failed(fake: FakeServer):
    fake.engine.fail_after = 3
    events = frames(fake, {})
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "a seeded fault" in last["response"]["error"]["message"]
    [item] = last["response"]["output"]
    assert item["status"] == "incomplete"


def test_an_engine_failure_of_a_whole_answer_is_an_error(fake: FakeServer):
    fake.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError) as caught:
        fake.client().responses.create(**HELLO)
    assert caught.value.code == "engine_error"


def test_a_full_queue_is_429_streamed_or_not(fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeEngine, "pending", property(lambda engine: 200))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            fake.client().responses.create(**HELLO, stream=stream)


def test_a_reader_who_leaves_ends_the_request(fake: FakeServer):
    fake.engine.delay = 0.02
    stream = fake.client().responses.create(**HELLO, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while not fake.engine.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.engine.aborted


def test_truncation_drops_the_oldest_messages_until_the_rest_fits(fake: FakeServer):
    turns: list[Any] = [{"role": "developer", "content": "Be brief."}]
    for number in range(20):
        turns.append({"role": "user", "content": f"number {number} of the quick brown fox"})
        turns.append({"role": "assistant", "content": "The lazy dog"})
    turns.append({"role": "user", "content": "Last"})
    asked: dict[str, Any] = {"model": "fake", "input": turns, "max_output_tokens": 40}
    with pytest.raises(openai.BadRequestError) as caught:
        fake.client().responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    answer = fake.client().responses.create(**asked, truncation="auto")
    assert answer.truncation == "auto" and answer.status == "completed"
    prompt = prompt_of(fake)
    assert prompt.startswith("<|system|>Be brief.<|end|><|user|>number ")
    assert prompt.endswith("<|user|>Last<|end|><|assistant|>")
    room = 256 - 40 - len(fake.engine.requests[-1].tokens)
    assert 0 <= room < len(fake.tokenizer.encode("number 19 of the quick brown fox")) + 20


def test_the_tokens_of_an_input_can_be_counted_without_an_answer(fake: FakeServer):
    before = len(fake.engine.requests)
    counted = fake.client().responses.input_tokens.count(
        model="fake", input="Hello", instructions="Be brief."
    )
    assert counted.object == "response.input_tokens"
    assert len(fake.engine.requests) == before
    answer = fake.client().responses.create(**HELLO, instructions="Be brief.")
    assert answer.usage and answer.usage.input_tokens == counted.input_tokens
    refused = httpx.post(f"{fake.url}/v1/responses/input_tokens", json=HELLO | {"stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


def test_an_internal_error_ends_a_stream_with_an_error_event(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> bytes:
        raise RuntimeError("a seeded fault")

    monkeypatch.setattr("server.apis.responses.output.OutputItems.feed", broken)
    last = frames(fake, {})[-1]
    assert last["type"] == "error" and last["sequence_number"] == 2
    assert (last["code"], last["param"]) == ("internal_error", None)
    assert "seeded" not in last["message"]
    # The server logs it after its last frame, perhaps after this test's fixture looks at the log.
    deadline = time.monotonic() + 10
    while not any(record.levelname == "ERROR" for record in caplog.records):
        assert time.monotonic() < deadline, "the error was not logged"
        time.sleep(0.01)
    caplog.clear()
