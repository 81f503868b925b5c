"""Custom tools: called with a text, which may have to follow a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai import BadRequestError
from tokenizers import Tokenizer

from server.constrained import request_grammar
from server.errors import UnsupportedParameter
from server.tool_calls.custom import CustomCalls, input_of
from server.tool_calls.parser.deltas import ContentDelta, ToolCallDelta
from tests.support.parsing.format_cases import BETWEEN_DELIMITERS, NAMES, call
from tests.support.parsing.tool_grammars import accepts, grammar_of, tokenizer_with_special
from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import QUESTION, prompt_of, qwen_server

TEXT = 'print("Hi")\n'
CALL = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": TEXT})}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs Python"}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
ASK: dict[str, Any] = {"model": "fake", "messages": QUESTION, "tools": [RUN, TIME]}
NAMED: dict[str, Any] = {"type": "custom", "custom": {"name": "run"}}


def formed(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    custom = {"name": "run", "format": {"type": "grammar", "grammar": grammar}}
    return {"type": "custom", "custom": custom}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


def test_the_model_sees_a_function_and_the_caller_gets_its_input(fake: FakeServer):
    fake.say(CALL + OTHER)
    [choice] = fake.client().chat.completions.create(**ASK).choices
    custom, function = choice.message.tool_calls or []
    assert custom.type == "custom" and custom.id.startswith("call_")
    assert (custom.custom.name, custom.custom.input) == ("run", TEXT)
    assert function.type == "function" and function.function.name == "time"
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert '"name": "run"' in prompt_of(fake) and '"input"' in prompt_of(fake)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("calls", [CALL, OTHER + CALL, CALL + OTHER, CALL + CALL])
def test_a_stream_sends_a_custom_call_in_one_chunk(fake: FakeServer, step: int, calls: str):
    fake.engine.step = step
    fake.say(calls + "So.")
    received: list[dict[str, Any]] = []
    content = ""
    for chunk in fake.client().chat.completions.create(**ASK, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        received += [call.model_dump(exclude_none=True) for call in delta.tool_calls or ()]
    custom = [call["custom"] for call in received if call.get("type") == "custom"]
    assert custom == [{"name": "run", "input": TEXT}] * calls.count(CALL)
    assert {call["index"] for call in received} == set(range(calls.count("</tool_call>")))
    assert content == "So."


def test_a_call_goes_back_to_the_template_as_the_model_wrote_it(fake: FakeServer):
    fake.say(CALL)
    client = fake.client()
    made = client.chat.completions.create(**ASK).choices[0].message
    assert made.tool_calls
    result = {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "Hi"}
    again: dict[str, Any] = ASK | {
        "messages": [*QUESTION, made.model_dump(exclude_none=True), result]
    }
    client.chat.completions.create(**again)
    arguments = json.dumps({"input": TEXT})
    assert f'<tool_call>{{"name": "run", "arguments": {arguments}}}' in prompt_of(fake)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        NAMED,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ],
)
def test_a_custom_tool_can_be_the_one_that_must_be_called(fake: FakeServer, choice: Any):
    fake.say(CALL)
    [answer] = fake.client().chat.completions.create(**ASK, tool_choice=choice).choices
    assert answer.message.tool_calls and answer.message.tool_calls[0].type == "custom"
    grammar = fake.engine.requests[-1].params.grammar
    assert '"input"' in grammar and ("arguments1" in grammar) == (choice == "required")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BETWEEN_DELIMITERS])
def test_an_input_in_a_string_follows_a_regular_expression(tokenizer: Tokenizer, name: str):
    tools = [formed("regex", r'say "[a-z]+"(\n[0-9]+)*')]
    options: list[dict[str, Any]] = [{"tool_choice": "required"}, {}]
    for more in options:
        grammar = grammar_of(tokenizer, name, tools=tools, **more)
        assert grammar is not None
        for text, fine in (('say "hi"\n12\n3', True), ('say "hi"', True), ("say hi", False)):
            assert (
                accepts(tokenizer, grammar, call(name, "run", json.dumps({"input": text}))) == fine
            )


@pytest.mark.parametrize("name", BETWEEN_DELIMITERS)
@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("regex", r"[a-z]+(\+[a-z]+)*"), ("lark", "start: WORD (/\\+/ WORD)*\nWORD: /[a-z]+/")],
)
def test_an_input_between_marks_follows_a_grammar(
    tokenizer: Tokenizer, name: str, syntax: str, definition: str
):
    grammar = grammar_of(
        tokenizer, name, tools=[formed(syntax, definition)], tool_choice="required"
    )
    assert grammar is not None
    for text, fine in (("a", True), ("a+b+cd", True), ("", False), ("a+", False), ("a b", False)):
        assert (
            accepts(tokenizer, grammar, call(name, "run", json.dumps({"input": text}))) == fine
        ), text


def test_lark_inside_of_strings_is_refused_by_name(tokenizer: Tokenizer, fake: FakeServer):
    path = "tools[0].custom.format.grammar.syntax"
    for name in ("hermes", "lfm2", "harmony"):
        with pytest.raises(UnsupportedParameter) as refused:
            grammar_of(tokenizer, name, tools=[formed("lark", 'start: "a"')])
        assert refused.value.param == path
    body: dict[str, Any] = ASK | {"tools": [formed("lark", 'start: "a"')]}
    with pytest.raises(BadRequestError, match="lark") as received:
        fake.client().chat.completions.create(**body)
    assert (received.value.param, received.value.code) == (path, "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [formed("regex", "(")]}, "tools[0].custom.format.grammar.definition", "group"),
        ({"tools": [formed("lark", "x: y")]}, "tools[0].custom.format.grammar.definition", ""),
        ({"tools": [formed("ebnf", "x")]}, "tools[0].custom.format.grammar.syntax", "'lark'"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "required"),
        ({"tools": [RUN, RUN]}, "tools[1].custom.name", "earlier"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name", ""),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
         "tools[0].custom.format.grammar", "required"),
        ({"tools": [RUN | {"function": {"name": "x"}}]}, "tools[0].function", "not a parameter"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "time"}}},
         "tool_choice.custom.name", "custom time"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}},
         "tool_choice.function.name", "function run"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fake: FakeServer, body: dict[str, Any], param: str, words: str):
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=ASK | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_parts_of_a_call_are_joined_and_all_else_goes_its_way():
    calls = CustomCalls({"run"})
    first = ToolCallDelta(0, '{"inp', "call_1", "run")
    assert calls.converted([ContentDelta("a"), first], last=False) == [ContentDelta("a")]
    assert calls.converted([ToolCallDelta(0, 'ut": "x\\n')], last=False) == []
    function = ToolCallDelta(1, "{}", "call_2", "f")
    whole = ToolCallDelta(0, "x\ny", "call_1", "run", custom=True)
    rest = [ToolCallDelta(0, 'y"}'), function, ToolCallDelta(1, " ")]
    assert calls.converted(rest, last=False) == [whole, function, ToolCallDelta(1, " ")]
    assert calls.converted([first], last=True)[0] == ToolCallDelta(
        0, '{"inp', "call_1", "run", True
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\tb"}', "a\tb"),
        ('{"input": "cut of', "cut of"),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_the_input_is_the_text_that_was_written(arguments: str, text: str):
    assert input_of(arguments) == text


def test_the_grammars_of_many_custom_tools_have_a_time_limit(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request_grammar, "CUSTOM_SECONDS", 0.0)
    tools = [formed("regex", "[0-9]+"), formed("regex", "[a-z]+")]
    tools[1]["custom"]["name"] = "walk"
    with pytest.raises(BadRequestError, match="may take 0 s in all; send fewer") as caught:
        fake.client().chat.completions.create(**ASK | {"tools": tools})
    assert str(caught.value.param).endswith("].custom.format.grammar.definition")
