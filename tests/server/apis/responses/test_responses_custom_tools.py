"""Custom tools in /v1/responses: items and events of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import prompt_of, qwen_server

TEXT = 'print("Hi")\n'
CALL = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": TEXT})}}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
RUN: dict[str, Any] = {"type": "custom", "name": "run", "description": "Runs Python"}
TIME: dict[str, Any] = {"type": "function", "name": "time"}
ASK: dict[str, Any] = {"model": "fake", "input": "Greet me.", "tools": [RUN, TIME]}
NAMED: dict[str, Any] = {"type": "custom", "name": "run"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory) as server:
        yield server


def formed(definition: str, syntax: str = "regex") -> dict[str, Any]:
    return RUN | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def test_a_call_is_an_item_and_its_output_goes_back_to_the_model(fake: FakeServer):
    fake.say(CALL + TIME_CALL)
    client = fake.client()
    made = client.responses.create(**ASK)
    custom, function = made.output
    assert custom.type == "custom_tool_call" and (custom.id or "").startswith("ctc_")
    assert (custom.name, custom.input) == ("run", TEXT)
    assert function.type == "function_call"
    assert made.tools[0].model_dump(exclude_none=True) == RUN | {"format": {"type": "text"}}
    outputs: list[Any] = [
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "Hi"},
        {"type": "function_call_output", "call_id": function.call_id, "output": "noon"},
    ]
    fake.say("Done.")
    again = client.responses.create(model="fake", previous_response_id=made.id, input=outputs)
    assert again.output_text == "Done."
    arguments = json.dumps({"input": TEXT})
    assert f'<tool_call>{{"name": "run", "arguments": {arguments}}}' in prompt_of(fake)
    listed = client.responses.input_items.list(again.id, order="asc")
    assert [item.type for item in listed] == [each["type"] for each in outputs]


def test_the_items_of_a_caller_who_keeps_them_are_taken(fake: FakeServer):
    fake.say("Done.")
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": TEXT}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Hi"}
    items: list[Any] = [{"role": "user", "content": "Greet me."}, call, output]
    body: dict[str, Any] = ASK | {"input": items}
    fake.client().responses.create(**body)
    assert '"name": "run"' in prompt_of(fake) and "<|tool|>Hi<|end|>" in prompt_of(fake)


@pytest.mark.parametrize("step", [1, 1000])
def test_a_stream_has_events_of_the_input(fake: FakeServer, step: int):
    fake.engine.step = step
    fake.say("So: " + CALL)
    events = list(fake.client().responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    assert kinds[-5:] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    delta, done = events[-4], events[-3]
    assert delta.type == "response.custom_tool_call_input.delta" and delta.delta == TEXT
    assert done.type == "response.custom_tool_call_input.done" and done.input == TEXT
    assert done.item_id == delta.item_id and done.output_index == 1


@pytest.mark.parametrize(
    "choice", [NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}]
)
def test_a_custom_tool_can_be_the_one_that_must_be_called(fake: FakeServer, choice: Any):
    fake.say(CALL)
    body: dict[str, Any] = ASK | {"tools": [formed("[a-z]+"), TIME], "tool_choice": choice}
    made = fake.client().responses.create(**body)
    assert made.output[0].type == "custom_tool_call"
    grammar = fake.engine.requests[-1].params.grammar
    assert "^(?:[a-z]+)$" in grammar and "time" not in grammar
    format = made.tools[0].model_dump()["format"]
    assert format == {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [formed("(")]}, "tools[0].format.definition"),
        ({"tools": [formed('start: "a"', "lark")]}, "tools[0].format.syntax"),
        ({"tools": [RUN | {"format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [formed("x", "ebnf")]}, "tools[0].format.syntax"),
        ({"tools": [RUN | {"format": {"type": "grammar", "syntax": "regex"}}]},
         "tools[0].format.definition"),
        ({"tools": [RUN, RUN]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "custom", "name": "time"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto",
                          "tools": [{"type": "function", "name": "run"}]}},
         "tool_choice.tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "run", "input": ""}]},
         "input[0]"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
         "input[0].call_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_as_it_was_written(
    fake: FakeServer, body: dict[str, Any], param: str
):
    answer = httpx.post(f"{fake.url}/v1/responses", json=ASK | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "custom.format" not in answer.text
