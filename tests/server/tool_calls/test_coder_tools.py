"""Calls whose arguments stand between delimiters: what must be called, through the whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import PARAMETERS, QUESTION, prompt_of, qwen_server

CODER = "{# <tool_call> <function=example> <parameter=key> #}"
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, CODER) as server:
        yield server


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_can_be_required_of_a_model_that_writes_no_json(fake: FakeServer, choice: Any):
    fake.say(CALL)
    body: dict[str, Any] = {"model": "fake", "messages": QUESTION, "tools": [WEATHER]}
    answer = fake.client().chat.completions.create(**body, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    grammar = fake.engine.requests[-1].params.grammar
    assert "<function=weather>" in grammar and "weather" in prompt_of(fake)
