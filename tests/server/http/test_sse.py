"""The bytes of a stream, frame by frame, and what happens when the reader goes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2 as httpx
import pytest

from server.errors import RequestError
from server.http import sse
from server.http.sse import DeltaFrame, EventStream, EventWriter, frame
from tests.support.server.fake_engine import GREETING, FakeServer

HELLO = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "stream": True}


def events(answer: httpx.Response) -> list[Any]:
    """The data of each event; [DONE] as a string."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    assert all(re.fullmatch("data: .+", line) for line in frames), frames
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in frames]


def test_the_frames_of_a_chat_are_exactly_these(fake: FakeServer):
    fake.say("Hello, ")
    options = {"stream_options": {"include_usage": True}}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=HELLO | options)
    id, created, print_ = re.search(
        r'"id":"(chatcmpl-\w{32})".*?"created":(\d+).*?"system_fingerprint":"(fp_\w{10})"',
        answer.text,
    ).groups()  # type: ignore[union-attr]
    head = (
        f'data: {{"id":"{id}","object":"chat.completion.chunk","created":{created},'
        f'"model":"fake","system_fingerprint":"{print_}","choices":['
    )

    def chunk(delta: str, finish: str = "null", stop: str = "") -> str:
        return (
            f'{head}{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}{stop}}}],'
            '"usage":null}\n\n'
        )

    usage = (
        '"usage":{"prompt_tokens":4,"completion_tokens":4,"total_tokens":8,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":'
        '{"reasoning_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}'
    )
    assert answer.text == "".join(
        [
            chunk('{"role":"assistant","content":""}'),
            chunk('{"content":"Hello"}'),
            chunk('{"content":","}'),
            chunk('{"content":" "}'),
            chunk("{}", '"stop"', ',"stop_reason":null'),
            f"{head}],{usage}}}\n\n",
            "data: [DONE]\n\n",
        ]
    )


def test_without_include_usage_no_chunk_has_a_usage(fake: FakeServer):
    *chunks, done = events(httpx.post(f"{fake.url}/v1/chat/completions", json=HELLO))
    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_the_frames_of_a_text_completion_end_with_finish_and_done(fake: FakeServer):
    body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 3}
    *chunks, done = events(httpx.post(f"{fake.url}/v1/completions", json=body))
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", ",", " ", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["length"]


def test_outputs_that_waited_together_are_one_chunk(fake: FakeServer):
    fake.engine.step = 1000
    chunks = events(httpx.post(f"{fake.url}/v1/chat/completions", json=HELLO))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": GREETING}, {}]


def test_an_error_before_the_first_token_has_a_true_status(fake: FakeServer):
    fake.engine.fail_after = 0
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=HELLO)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert "a seeded fault" in error["message"]


def test_an_error_after_the_first_token_is_a_frame_before_done(fake: FakeServer):
    fake.engine.fail_after = 2
    *chunks, error, done = events(httpx.post(f"{fake.url}/v1/chat/completions", json=HELLO))
    assert done == "[DONE]" and len(chunks) == 3
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_a_delta_frame_is_the_chunk_with_its_text_replaced():
    chunk = {"a": [{"text": DeltaFrame.MARK, "b": None}]}
    for text in ("", "hi", 'quote " and \\', "\u2028 \n \x00 \N{WAVING HAND SIGN}"):
        assert DeltaFrame(chunk).of(text) == frame({"a": [{"text": text, "b": None}]})


class RecordingWire:
    """An ASGI server's two ends."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    wire = RecordingWire()

    async def produce(writer: EventWriter) -> None:
        while wire.body.count(sse.KEEP_ALIVE) < 3:
            await asyncio.sleep(0.005)
        await writer.write(b"data: 1\n\n")

    await EventStream(produce, lambda: None)({}, wire.receive, wire.send)
    assert wire.sent[0]["type"] == "http.response.start"
    assert wire.body.endswith(sse.KEEP_ALIVE + b"data: 1\n\ndata: [DONE]\n\n")
    assert not wire.sent[-1]["more_body"]


async def test_a_refusal_before_the_first_frame_is_raised_and_nothing_is_sent():
    wire = RecordingWire()

    async def produce(writer: EventWriter) -> None:
        raise RequestError("no")

    with pytest.raises(RequestError):
        await EventStream(produce, lambda: None)({}, wire.receive, wire.send)
    assert wire.sent == []


async def test_a_reader_that_goes_cancels_the_work():
    wire = RecordingWire()
    cancelled = asyncio.Event()

    async def produce(writer: EventWriter) -> None:
        try:
            await writer.write(b"data: 1\n\n")
            wire.gone.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    closed: list[bool] = []
    await EventStream(produce, lambda: closed.append(True))({}, wire.receive, wire.send)
    assert cancelled.is_set() and closed == [True]
    assert sse.DONE not in wire.body


async def test_an_internal_error_is_sent_to_the_client_and_raised_for_the_log():
    wire = RecordingWire()

    async def produce(writer: EventWriter) -> None:
        await writer.write(b"data: 1\n\n")
        raise ZeroDivisionError("secret")

    with pytest.raises(ZeroDivisionError):
        await EventStream(produce, lambda: None)({}, wire.receive, wire.send)
    assert wire.body.endswith(b'"code":"internal_error"}}\n\ndata: [DONE]\n\n')
    assert b"secret" not in wire.body


async def test_work_that_never_began_is_closed_all_the_same():
    wire = RecordingWire()
    closed = asyncio.Event()

    async def produce(writer: EventWriter) -> None:
        raise AssertionError("cancelled before it began")

    stream = EventStream(produce, closed.set)
    task = asyncio.ensure_future(stream({}, wire.receive, wire.send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()
