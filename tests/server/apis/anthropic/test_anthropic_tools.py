"""Tools, thinking and forms of answers in /v1/messages, with a model that writes as Qwen's do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from server.apis.anthropic.request import FIELDS, anthropic_id, model_id
from server.apis.field_names import map_error_fields
from server.errors import FieldPath, RequestError
from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import (
    CALL,
    CAN_BE_QUIET,
    HUGE,
    HUGE_CALL,
    OTHER,
    PARAMETERS,
    QUESTION,
    prompt_of,
    qwen_server,
)

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": PARAMETERS,
}
TIME = {"name": "time", "input_schema": {"type": "object"}}
ASK: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 2000,
    "messages": QUESTION,
    "tools": [WEATHER, TIME],
}
PLAIN = {name: value for name, value in ASK.items() if name != "tools"}
REASONING = "<think>\nRome is in Italy.\n</think>\n\nSunny."


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, CAN_BE_QUIET) as server:
        yield server


@pytest.fixture
def client(fake: FakeServer) -> anthropic.Anthropic:
    return fake.closing(anthropic.Anthropic(base_url=fake.url, api_key="none", max_retries=0))


def without_ids(content: list[Any]) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in content]


def test_calls_are_blocks_after_the_text(fake: FakeServer, client: anthropic.Anthropic):
    fake.say("Let me look." + CALL + OTHER)
    message = client.messages.create(**ASK)
    assert message.stop_reason == "tool_use"
    assert without_ids(message.content) == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert '"name": "weather"' in prompt_of(fake) and '"required": ["city"]' in prompt_of(fake)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_of_calls_is_the_same_message(
    fake: FakeServer, client: anthropic.Anthropic, step: int
):
    fake.engine.step = step
    fake.say("Let me look." + CALL + OTHER)
    plain = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream if event.type.startswith("content_block_st")]
        streamed = stream.get_final_message()
    assert kinds == ["content_block_start", "content_block_stop"] * 3
    assert without_ids(streamed.content) == without_ids(plain.content)
    ids = [block.id for block in streamed.content if block.type == "tool_use"]
    assert len(set(ids)) == 2 and all(id.startswith("toolu_") for id in ids)
    assert (streamed.stop_reason, streamed.usage) == (plain.stop_reason, plain.usage)


def test_each_block_ends_before_the_next_begins(fake: FakeServer):
    fake.say(REASONING + CALL + OTHER)
    answer = httpx.post(f"{fake.url}/v1/messages", json=ASK | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    inside: int | None = None
    seen = 0
    for event in events:
        if event["type"] == "content_block_start":
            assert inside is None and event["index"] == seen
            inside, seen = seen, seen + 1
        elif event["type"] == "content_block_delta":
            assert event["index"] == inside
        elif event["type"] == "content_block_stop":
            assert event["index"] == inside
            inside = None
        else:
            assert event["type"] == "ping" or inside is None
    assert seen == 4 and inside is None


@pytest.mark.parametrize(
    ("made", "sent"),
    [
        ("Ab3dE6gH9", "toolu_Ab3dE6gH9"),
        ("functions.get_weather:12", "toolu_functions-get_weather-12"),
        ("functions.a-1:0", "toolu_functions-a-1-0"),
    ],
)
def test_a_template_that_knows_the_form_of_ids_reads_its_own(made: str, sent: str):
    assert (anthropic_id(made), model_id(sent)) == (sent, made)


@pytest.mark.parametrize("id", ["call_1", "toolu_01A09q90qw90lq917835lq9x", "toolu_1", "x"])
def test_other_ids_reach_the_template_as_they_are(
    fake: FakeServer, client: anthropic.Anthropic, id: str
):
    assert model_id(id) == id
    use: Any = {"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Rome"}}
    result: Any = {"type": "tool_result", "tool_use_id": id, "content": "22 degrees"}
    turns: list[Any] = [{"role": "assistant", "content": [use]}]
    turns.append({"role": "user", "content": [result]})
    client.messages.create(**ASK | {"messages": [*ASK["messages"], *turns]})
    assert "<|tool|>22 degrees<|end|>" in prompt_of(fake)


def test_a_tool_loop_goes_through_the_template(fake: FakeServer, client: anthropic.Anthropic):
    fake.say(CALL)
    called = client.messages.create(**ASK)
    [block] = called.content
    assert re.fullmatch("toolu_[a-zA-Z0-9]{24}", block.id)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "22 degrees"}
    fake.say("It is 22 degrees.")
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Short!"}]},
    ]
    answer = client.messages.create(**ASK | {"messages": turns})
    assert answer.content[0].text == "It is 22 degrees." and answer.stop_reason == "end_turn"
    assert '"arguments": {"city": "Rome"}' in prompt_of(fake)
    assert "<|tool|>22 degrees<|end|><|user|>Short!<|end|>" in prompt_of(fake)
    failed = result | {"is_error": True, "content": [{"type": "text", "text": "no network"}]}
    turns[-1] = {"role": "user", "content": [failed]}
    client.messages.create(**ASK | {"messages": turns})
    assert prompt_of(fake).endswith("<|tool|>Error: no network<|end|><|assistant|>")


def test_one_call_at_a_time_if_the_caller_wants(fake: FakeServer, client: anthropic.Anthropic):
    fake.say(CALL + OTHER)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(**ASK, tool_choice=choice)
    assert [block.name for block in message.content] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "tool", "name": "time"}, 1),
        ({"type": "tool", "name": "time", "disable_parallel_tool_use": False}, 1),
        ({"type": "any"}, 2),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
    ],
)
def test_a_tool_that_is_named_is_used_once(
    fake: FakeServer, client: anthropic.Anthropic, choice: dict[str, Any], calls: int
):
    fake.say(OTHER + OTHER)
    message = client.messages.create(**ASK, tool_choice=choice)
    assert [block.type for block in message.content].count("tool_use") == calls


def test_tool_choice_none_hides_the_tools(fake: FakeServer, client: anthropic.Anthropic):
    message = client.messages.create(**ASK, tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn" and "<tools>" not in prompt_of(fake)


def test_a_call_that_max_tokens_cuts_off_keeps_what_there_is_of_it(
    fake: FakeServer, client: anthropic.Anthropic
):
    cut = CALL[: CALL.index('me"}')]
    fake.say(cut, end=False)
    message = client.messages.create(**ASK | {"max_tokens": len(fake.tokenizer.encode(cut))})
    assert message.stop_reason == "max_tokens"
    assert without_ids(message.content) == [
        {"type": "tool_use", "name": "weather", "input": {"city": "Ro"}}
    ]


def test_a_call_that_a_stop_sequence_cuts_short_is_not_to_be_made(
    fake: FakeServer, client: anthropic.Anthropic
):
    fake.say(CALL)
    message = client.messages.create(**ASK, stop_sequences=["Rome"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Rome")
    with client.messages.stream(**ASK, stop_sequences=["Rome"]) as stream:
        assert stream.get_final_message().stop_reason == "stop_sequence"
    whole = client.messages.create(**ASK, stop_sequences=["</tool_call>"])
    assert (whole.stop_reason, without_ids(whole.content)[0]["input"]) == (
        "tool_use",
        {"city": "Rome"},
    )


def test_a_number_of_more_than_64_bits_is_an_argument_like_others(
    fake: FakeServer, client: anthropic.Anthropic
):
    fake.say(HUGE_CALL)
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.input for block in message.content] == [{"city": HUGE}]


def test_thinking_is_a_signed_block_of_its_own(fake: FakeServer, client: anthropic.Anthropic):
    fake.say(REASONING)
    whole = client.messages.create(**PLAIN)
    with client.messages.stream(**PLAIN) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        reasoning, text = message.content
        assert (reasoning.type, reasoning.thinking) == ("thinking", "Rome is in Italy.")
        assert (text.type, text.text) == ("text", "Sunny.")
        assert reasoning.signature == whole.content[0].signature
    turns = [*PLAIN["messages"], {"role": "assistant", "content": whole.content}]
    turns.append({"role": "user", "content": "Sure?"})
    client.messages.create(**PLAIN | {"messages": turns})
    assert "<|assistant|>Sunny.<|end|>" in prompt_of(fake)


def test_thinking_can_be_left_out_of_the_answer(fake: FakeServer, client: anthropic.Anthropic):
    fake.say(REASONING)
    hidden = PLAIN | {"thinking": {"type": "adaptive", "display": "omitted"}}
    with client.messages.stream(**hidden) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**hidden), streamed):
        reasoning, text = message.content
        assert (reasoning.thinking, text.text) == ("", "Sunny.") and reasoning.signature


@pytest.mark.parametrize(
    ("thinking", "shut"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, False),
        ({"type": "adaptive"}, False),
        ({"type": "disabled"}, True),
    ],
)
def test_thinking_is_switched_in_the_template(
    fake: FakeServer, client: anthropic.Anthropic, thinking: dict[str, Any], shut: bool
):
    client.messages.create(**PLAIN, thinking=thinking)
    assert prompt_of(fake).endswith("</think>\n\n") == shut


@pytest.mark.parametrize(
    ("max_tokens", "limited"), [(1500, True), (5000, True), (1025, True), (20, False)]
)
def test_a_budget_ends_the_thinking(
    fake: FakeServer, client: anthropic.Anthropic, max_tokens: int, limited: bool
):
    thinking: Any = {"type": "enabled", "budget_tokens": 1024} if limited else {"type": "adaptive"}
    body: dict[str, Any] = PLAIN | {"max_tokens": max_tokens, "thinking": thinking}
    client.messages.create(**body)
    assert ("max_tokens=" in fake.engine.requests[-1].params.grammar) == limited


def test_the_tools_count_as_part_of_the_prompt(fake: FakeServer, client: anthropic.Anthropic):
    body = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = client.messages.count_tokens(**body).input_tokens
    client.messages.create(**ASK)
    assert counted == len(fake.engine.requests[-1].tokens)


def test_a_schema_for_the_answer_becomes_a_grammar(fake: FakeServer, client: anthropic.Anthropic):
    fake.say('{"city": "Rome"}')
    form = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    message = client.messages.create(**PLAIN, output_config=form)
    assert message.content[0].text == '{"city": "Rome"}'
    assert "city" in fake.engine.requests[-1].params.grammar


def test_a_strict_schema_that_cannot_be_enforced_is_named(client: anthropic.Anthropic):
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    strict = TIME | {"input_schema": schema, "strict": True}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASK | {"tools": [WEATHER, strict]})
    assert "`tools[1].input_schema.properties.a.uniqueItems`" in refused.value.message


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}])
def test_a_call_that_must_be_made_is_enforced(
    fake: FakeServer, client: anthropic.Anthropic, choice: dict[str, Any]
):
    fake.say(OTHER)
    message = client.messages.create(**ASK, tool_choice=choice)
    assert [block.name for block in message.content] == ["time"]
    grammar = fake.engine.requests[-1].params.grammar
    assert "time" in grammar and ("weather" in grammar) == (choice["type"] == "any")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (("tools", 0, "function", "parameters", "type"), "tools[0].input_schema.type"),
        (("tools", 12, "function", "name"), "tools[12].name"),
        (("structured_outputs", "json", 7), "output_config.format.schema[7]"),
        (("messages", 1, "content"), "messages[0].content"),
        (("messages", 0), "system"),
        (("stop", 1), "stop_sequences[1]"),
        (("stopped",), "stopped"),
    ],
)
def test_an_error_names_fields_as_the_caller_wrote_them(sent: tuple[str | int, ...], expected: str):
    with (
        pytest.raises(RequestError) as refused,
        map_error_fields(FIELDS, [[FieldPath("system")], [FieldPath("messages", 0)]]),
    ):
        raise RequestError("look at {}, stop", FieldPath(*sent))
    assert refused.value.param == expected
    assert refused.value.message == f"look at `{expected}`, stop"
