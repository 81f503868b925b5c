"""Tools, thinking and forms of answers in Ollama's routes, with a model that writes as Qwen's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import (
    CALL,
    CAN_BE_QUIET,
    HUGE,
    HUGE_CALL,
    OTHER,
    QUESTION,
    prompt_of,
    qwen_server,
)

REASONING = "<think>\nRome is in Italy.\n</think>\n\nSunny."


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return "22 degrees"


def time() -> str:
    """The time of day."""
    return "noon"


TOOLS: list[Any] = [weather, time]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, CAN_BE_QUIET) as server:
        yield server


@pytest.fixture
def client(fake: FakeServer) -> Iterator[ollama.Client]:
    with ollama.Client(fake.url) as client:
        yield client


def calls_of(message: ollama.Message) -> list[tuple[str, dict[str, Any]]]:
    calls = message.tool_calls or ()
    return [(call.function.name, dict(call.function.arguments)) for call in calls]


BOTH = [("weather", {"city": "Rome"}), ("time", {})]


def test_calls_come_with_their_arguments_as_objects(fake: FakeServer, client: ollama.Client):
    fake.say("Let me look." + CALL + OTHER)
    answer = client.chat("fake", QUESTION, tools=TOOLS)
    assert answer.message.content == "Let me look." and calls_of(answer.message) == BOTH
    assert '"name": "weather"' in prompt_of(fake)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_sends_each_call_whole(fake: FakeServer, client: ollama.Client, step: int):
    fake.engine.step = step
    fake.say("Let me look." + CALL + OTHER)
    lines = list(client.chat("fake", QUESTION, tools=TOOLS, stream=True))
    assert [call for line in lines for call in calls_of(line.message)] == BOTH
    assert "".join(line.message.content or "" for line in lines) == "Let me look."
    assert lines[-1].done and not lines[-1].message.tool_calls


def test_a_number_of_more_than_64_bits_is_an_argument_like_others(
    fake: FakeServer, client: ollama.Client
):
    fake.say(HUGE_CALL)
    answers = [client.chat("fake", QUESTION, tools=TOOLS)]
    answers += [line for line in client.chat("fake", QUESTION, tools=TOOLS, stream=True)][:1]
    for answer in answers:
        assert calls_of(answer.message) == [("weather", {"city": HUGE})]


def test_a_tool_loop_goes_through_the_template(fake: FakeServer, client: ollama.Client):
    fake.say(CALL + OTHER)
    called = client.chat("fake", QUESTION, tools=TOOLS).message
    results = [
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "22 degrees"},
    ]
    fake.say("It is 22 degrees.")
    answer = client.chat("fake", [*QUESTION, called, *results], tools=TOOLS)
    assert answer.message.content == "It is 22 degrees."
    assert '"arguments": {"city": "Rome"}' in prompt_of(fake)
    assert "<|tool|>noon<|end|><|tool|>22 degrees<|end|>" in prompt_of(fake)


def test_thinking_is_a_field_of_its_own(fake: FakeServer, client: ollama.Client):
    fake.say(REASONING)
    message = client.chat("fake", QUESTION, think=True).message
    assert (message.thinking, message.content) == ("Rome is in Italy.", "Sunny.")
    lines = list(client.chat("fake", QUESTION, think=True, stream=True))
    assert "".join(line.message.thinking or "" for line in lines) == "Rome is in Italy."
    assert "".join(line.message.content or "" for line in lines) == "Sunny."
    text = client.generate("fake", "Weather?", think=True)
    assert (text.thinking, text.response) == ("Rome is in Italy.", "Sunny.")


@pytest.mark.parametrize("think", [True, False])
def test_thinking_is_switched_in_the_template(fake: FakeServer, client: ollama.Client, think: bool):
    client.chat("fake", QUESTION, think=think)
    assert prompt_of(fake).endswith("</think>\n\n") != think


def test_show_lists_the_capabilities_of_the_model(fake: FakeServer, client: ollama.Client):
    assert client.show("fake").capabilities == ["completion", "tools", "thinking"]


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_a_format_becomes_a_grammar(
    fake: FakeServer, client: ollama.Client, form: str | dict[str, Any]
):
    fake.say('{"city": "Rome"}')
    assert client.chat("fake", QUESTION, format=form).message.content == '{"city": "Rome"}'
    whole = fake.engine.requests[-1].params.grammar
    assert whole and ("city" in whole) == (form is SCHEMA)
    assert client.generate("fake", "Rome", raw=True, format=form).response == '{"city": "Rome"}'
    assert fake.engine.requests[-1].params.grammar
