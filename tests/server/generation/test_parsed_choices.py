"""Several answers to one chat with tools, and delimiters that are special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server import fake_engine
from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import CALL, PARAMETERS, QUESTION, qwen_server

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ASK: dict[str, Any] = {"model": "fake", "messages": QUESTION, "tools": [WEATHER]}
DELIMITERS = ["<tool_call>", "</tool_call>"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "SPECIAL", [*fake_engine.SPECIAL, *DELIMITERS])
        with qwen_server(tmp_path_factory) as server:
            yield server


def choices(fake: FakeServer, **change: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=ASK | change)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_delimiters_of_calls_are_read_where_they_are_special_tokens(fake: FakeServer):
    [delimiter] = fake.tokenizer.encode(DELIMITERS[0])
    assert delimiter in fake.tokenizer.special_ids
    fake.say("Let me look." + CALL)
    [choice] = choices(fake)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."


@pytest.mark.parametrize("step", [1, 1000])
def test_each_of_several_answers_is_parsed_by_itself(fake: FakeServer, step: int):
    texts = ["It is sunny.", CALL, "<think>Rome?</think>Rain."]
    said = [[*fake.tokenizer.encode(text), 0] for text in texts]
    fake.engine.step = step
    fake.engine.reply = lambda request: said[(request.id - 1) % 3]
    plain, called, reasoned = choices(fake, n=3)
    assert [each["finish_reason"] for each in (plain, called, reasoned)] == [
        "stop",
        "tool_calls",
        "stop",
    ]
    assert plain["message"]["content"] == "It is sunny."
    assert called["message"]["content"] is None and len(called["message"]["tool_calls"]) == 1
    assert reasoned["message"]["content"] == "Rain."
    assert reasoned["message"]["reasoning_content"] == "Rome?"
