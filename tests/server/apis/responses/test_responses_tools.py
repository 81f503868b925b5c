"""Reasoning, calls and formats in the Responses API, with a model that writes as Qwen's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from server.apis.media import Readable
from server.apis.responses.items import input_items
from server.apis.responses.routes import read_request
from server.apis.responses.translate import chat_request, conversation_of
from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import CALL, OTHER, PARAMETERS, prompt_of, qwen_server

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": PARAMETERS,
}
TIME: dict[str, Any] = {"type": "function", "name": "time"}
NAMED_TIME = {"type": "function", "function": {"name": "time"}}
TEXT = Readable("fake", images=False)
ASK: dict[str, Any] = {"model": "fake", "input": "Weather in Rome?", "tools": [WEATHER, TIME]}
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory) as server:
        yield server


def events(fake: FakeServer, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"{fake.url}/v1/responses", json={**ASK, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return [json.loads(block.split("\ndata: ")[1]) for block in answer.text.split("\n\n") if block]


def test_thought_words_and_calls_are_items_in_their_order(fake: FakeServer):
    fake.say(f"{THOUGHT}I will look.\n{CALL}\n{OTHER}")
    answer = fake.client().responses.create(**ASK)
    assert answer.status == "completed"
    thought, words, call, other = answer.output
    assert thought.type == "reasoning" and thought.id.startswith("rs_") and thought.summary == []
    assert thought.content and "Hm." in thought.content[0].text
    assert words.type == "message" and answer.output_text.strip() == "I will look."
    assert call.type == "function_call" and call.id and call.id.startswith("fc_")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert other.type == "function_call" and other.name == "time"
    assert call.call_id != other.call_id and call.status == "completed"
    usage = answer.usage
    assert usage and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_stream_of_thought_words_and_calls_is_exactly_these_events(fake: FakeServer):
    fake.say(f"{THOUGHT}I will look.\n{CALL}")
    told = events(fake)
    kinds = [event["type"].removeprefix("response.") for event in told]
    without_repeats = [k for k, before in zip(kinds, ["", *kinds], strict=False) if k != before]
    assert without_repeats == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [e["item"]["type"] for e in told if e["type"] == "response.output_item.added"] == [
        "reasoning",
        "message",
        "function_call",
    ]
    arguments = "".join(e["delta"] for e in told if "arguments.delta" in e["type"])
    [done] = [e for e in told if "arguments.done" in e["type"]]
    items = [e["item"] for e in told if e["type"] == "response.output_item.done"]
    assert json.loads(arguments) == {"city": "Rome"}
    assert (done["arguments"], done["name"]) == (arguments, "weather")
    assert done["item_id"] == items[2]["id"] and done["output_index"] == 2
    assert items[2]["arguments"] == arguments
    assert told[-1]["response"]["output"] == items


def test_the_clients_accumulation_sees_the_same_items(fake: FakeServer):
    fake.say(f"{THOUGHT}I will look.\n{CALL}\n{OTHER}")
    with fake.client().responses.stream(**ASK) as stream:
        final = stream.get_final_response()
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]


def test_a_tool_loop_over_stored_responses(fake: FakeServer):
    client = fake.client()
    fake.say(f"{THOUGHT}{CALL}")
    first = client.responses.create(**ASK)
    call = first.output[-1]
    assert call.type == "function_call"
    fake.say("Sunny.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    second = client.responses.create(
        model="fake", tools=[WEATHER], previous_response_id=first.id, input=[output]
    )
    assert second.output_text == "Sunny."
    tail = prompt_of(fake).partition("<|user|>")[2]
    assert tail.startswith("Weather in Rome?<|end|><|assistant|><tool_call>")
    assert tail.endswith("</tool_call><|end|><|tool|>22 degrees<|end|><|assistant|>")
    assert tail.count("Rome") == 2 and "Hm." not in tail


def test_a_tool_loop_without_a_store(fake: FakeServer):
    client = fake.client()
    fake.say(f"{THOUGHT}Look:\n{CALL}\n{OTHER}")
    first = client.responses.create(**ASK, store=False, include=["reasoning.encrypted_content"])
    calls = [item for item in first.output if item.type == "function_call"]
    client.responses.create(
        **ASK
        | {
            "input": [
                {"role": "user", "content": "Weather in Rome?"},
                *first.output,
                *[
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": [{"type": "input_text", "text": call.name}],
                    }
                    for call in calls
                ],
            ]
        }
    )
    tail = prompt_of(fake).partition("<|user|>")[2]
    assert tail.count("<|assistant|>") == 2, "words and calls of one answer are one message"
    assert "<|tool|>weather<|end|><|tool|>time<|end|>" in tail


def test_a_call_that_was_cut_is_incomplete(fake: FakeServer):
    fake.say(CALL)
    cut = len(fake.tokenizer.encode(CALL)) - 15
    answer = fake.client().responses.create(**ASK, max_output_tokens=cut)
    assert answer.status == "incomplete"
    last = answer.output[-1]
    assert last.type == "function_call" and last.status == "incomplete"


def test_only_allowed_tools_are_offered(fake: FakeServer):
    fake.say("Hello")
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "time"}],
    }
    answer = fake.client().responses.create(**ASK, tool_choice=choice)
    assert "weather" not in prompt_of(fake) and '"time"' in prompt_of(fake)
    assert len(answer.tools) == 2 and answer.tool_choice.type == "allowed_tools"  # type: ignore[union-attr]


def test_no_tools_are_offered_where_none_may_be_called(fake: FakeServer):
    fake.say("Hello")
    fake.client().responses.create(**ASK, tool_choice="none")
    assert "<tools>" not in prompt_of(fake)


def test_a_function_that_is_named_is_called_once(fake: FakeServer):
    fake.say(CALL + CALL)
    named = {"type": "function", "name": "weather"}
    for choice, calls in ((named, 1), ("required", 2)):
        answer = fake.client().responses.create(**ASK, tool_choice=choice)
        assert [item.type for item in answer.output].count("function_call") == calls


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [TIME]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED_TIME]}},
        ),
    ],
)
def test_a_choice_of_tools_is_chats(choice: Any, expected: Any):
    body = read_request(ASK | {"tool_choice": choice, "parallel_tool_calls": False}, TEXT)
    chat = chat_request(body, conversation_of(body, [], input_items(body.input)))
    wanted = chat.tool_choice
    assert expected == (wanted if isinstance(wanted, str | None) else wanted.model_dump())
    assert chat.parallel_tool_calls is False and chat.tools


def test_a_format_reaches_the_engine_as_a_grammar(fake: FakeServer):
    fake.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    answer = fake.client().responses.create(model="fake", input="x", text={"format": form})
    assert fake.engine.requests[-1].params.grammar
    assert answer.text and answer.text.format and answer.text.format.type == "json_schema"
    assert answer.text.format.schema_ == schema
    fake.client().responses.create(
        model="fake", input="x", text={"format": {"type": "json_object"}}
    )
    assert fake.engine.requests[-1].params.grammar
    fake.client().responses.create(model="fake", input="x", text={"format": {"type": "text"}})
    assert not fake.engine.requests[-1].params.grammar


def test_errors_of_tools_and_formats_name_this_routes_fields(fake: FakeServer):
    def told(**body: Any) -> tuple[str, str]:
        answer = httpx.post(f"{fake.url}/v1/responses", json=ASK | body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]

    param, message = told(tools=[WEATHER, WEATHER])
    assert param == "tools[1].name" and "`tools[1].name`" in message
    assert told(tools=[], tool_choice="required")[0] == "tool_choice"
    named = {"type": "function", "name": "none_such"}
    assert told(tool_choice=named)[0] == "tool_choice.name"
    form = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    param, message = told(text={"format": form})
    assert param.startswith("text.format.schema") and "response_format" not in message
    param, message = told(reasoning={"effort": "high"})
    assert param == "reasoning.effort" and "`reasoning.effort`" in message
    calls = [
        {"type": "function_call", "call_id": "c", "name": "time", "arguments": "}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    param, message = told(input=calls)
    assert param == "input[0].arguments" and "`input[0].arguments`" in message
