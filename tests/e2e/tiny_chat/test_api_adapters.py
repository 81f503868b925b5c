"""The built-in model's tool calls, reasoning and JSON through the other APIs' own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest

from tests.support.server.server_process import Server
from tests.support.server.tiny_chat_tools import (
    ANNA,
    HARD,
    HARD_ANSWER,
    HARD_THOUGHT,
    MODEL,
    NO_TOOL_NEEDED,
    PERSON,
    RESULT,
    TEXT,
    TOOL_ANSWER,
    TOOLS,
    TWO_CITIES,
    WEATHER,
)  # fmt: skip

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
FLAT: Any = [{"type": "function", "strict": False, **each} for each in FUNCTIONS]
INPUTS: Any = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
COLD: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# Responses.


def test_responses_call_a_tool_in_events_and_answer_with_its_result(server: Server) -> None:
    responses = server.client().responses
    events = list(responses.create(model=MODEL, input=WEATHER, tools=FLAT, stream=True, **COLD))
    deltas = [
        each.delta for each in events if each.type == "response.function_call_arguments.delta"
    ]
    assert len(deltas) > 1 and json.loads("".join(deltas)) == {"city": "Paris"}
    last: Any = events[-1]
    [call] = last.response.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    final = responses.create(
        model=MODEL, input=[result], previous_response_id=last.response.id, tools=FLAT, **COLD
    )
    assert final.output_text == TOOL_ANSWER


def test_responses_think_answer_without_tools_and_fill_forms(server: Server) -> None:
    responses = server.client().responses
    effort: Any = {"effort": "low"}
    reasoning, message = responses.create(model=MODEL, input=HARD, reasoning=effort, **COLD).output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == HARD_THOUGHT
    assert message.type == "message" and message.content[0].text == HARD_ANSWER
    question, answer = NO_TOOL_NEEDED
    assert responses.create(model=MODEL, input=question, tools=FLAT, **COLD).output_text == answer
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    filled = responses.create(model=MODEL, input=TEXT, text=form, **COLD)
    assert json.loads(filled.output_text) == ANNA


# Anthropic's messages.


def test_anthropics_messages_call_tools_and_answer_with_their_results(
    claude: anthropic.Anthropic,
) -> None:
    settings: Any = {"model": MODEL, "max_tokens": 200, "tools": INPUTS, "extra_body": COLD}
    with claude.messages.stream(messages=user(WEATHER), **settings) as stream:
        first = stream.get_final_message()
    [block] = first.content
    assert block.type == "tool_use" and (block.name, block.input) == (
        "get_weather", {"city": "Paris"},
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
    said = {"role": "assistant", "content": first.content}
    messages = [*user(WEATHER), said, {"role": "user", "content": [result]}]
    final = claude.messages.create(messages=messages, **settings)
    assert (final.content[0].text, final.stop_reason) == (TOOL_ANSWER, "end_turn")
    both = claude.messages.create(messages=user(TWO_CITIES), **settings).content
    assert [block.input for block in both] == [{"city": "Paris"}, {"city": "Rome"}]


def test_anthropics_messages_think_and_fill_forms(claude: anthropic.Anthropic) -> None:
    settings: Any = {"model": MODEL, "max_tokens": 2000}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(messages=user(HARD), thinking=thinking, **settings) as stream:
        reasoning, text = stream.get_final_message().content
    assert (reasoning.thinking, text.text) == (HARD_THOUGHT, HARD_ANSWER)
    form = {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}
    filled = claude.messages.create(messages=user(TEXT), extra_body=form, **settings)
    assert json.loads(filled.content[0].text) == ANNA


# Ollama's chat.


def test_ollamas_chat_calls_tools_and_answers_with_their_results(llama: ollama.Client) -> None:
    settings: Any = {"model": MODEL, "tools": TOOLS, "options": COLD}
    lines = list(llama.chat(messages=user(TWO_CITIES), stream=True, **settings))
    calls = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert [call.arguments for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    first = llama.chat(messages=user(WEATHER), **settings).message
    assert first.tool_calls and first.tool_calls[0].function.name == "get_weather"
    result = {"role": "tool", "tool_name": "get_weather", "content": RESULT}
    final = llama.chat(messages=[*user(WEATHER), first, result], **settings)
    assert final.message.content == TOOL_ANSWER


def test_ollamas_chat_thinks_and_fills_forms(llama: ollama.Client) -> None:
    slow = llama.chat(MODEL, user(HARD), think=True, options=COLD).message
    assert (slow.thinking, slow.content) == (HARD_THOUGHT, HARD_ANSWER)
    filled = llama.chat(MODEL, user(TEXT), format=PERSON, options=COLD).message.content
    assert json.loads(filled or "") == ANNA
