"""Tools and reasoning in chat, with a model that writes them as Qwen's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai import BadRequestError

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import (
    CALL,
    CAN_BEGIN,
    HUGE,
    HUGE_CALL,
    OTHER,
    PARAMETERS,
    QUESTION,
    prompt_of,
    qwen_server,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": PARAMETERS,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": QUESTION,
    "tools": [WEATHER, TIME],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, CAN_BEGIN) as server:
        yield server


def joined(fake: FakeServer, **body: Any) -> tuple[str, str, dict[int, list[str]], str | None]:
    """(content, reasoning, {index: [id, name, arguments]}, finish reason) of a stream."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    finish = None
    for chunk in fake.client().chat.completions.create(**body, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None and call.function.arguments is not None
            if call.index not in calls:
                assert call.type == "function" and call.id and call.function.name
                calls[call.index] = [call.id, call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
            calls[call.index][2] += call.function.arguments
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def test_tools_are_shown_to_the_model_and_its_calls_returned(fake: FakeServer):
    fake.say("Let me look." + CALL + OTHER)
    answer = fake.client().chat.completions.create(**ASK)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = choice.message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("weather", {"city": "Rome"}),
        ("time", {}),
    ]
    assert len({call.id for call in calls}) == 2 and calls[0].type == "function"
    prompt = prompt_of(fake)
    assert '"name": "weather"' in prompt and '"required": ["city"]' in prompt


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_of_calls_spells_them_and_their_arguments(fake: FakeServer, step: int):
    fake.engine.step = step
    fake.say("Let me look." + CALL + OTHER)
    content, _, calls, finish = joined(fake, **ASK)
    assert (content, finish) == ("Let me look.", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls.values()] == [
        ("weather", {"city": "Rome"}),
        ("time", {}),
    ]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("logprobs", [False, True])
def test_the_first_chunk_of_a_call_has_no_arguments_and_the_others_nothing_else(
    fake: FakeServer, step: int, logprobs: bool
):
    fake.engine.step = step
    fake.say(CALL + OTHER)
    stream = fake.client().chat.completions.create(**ASK, stream=True, logprobs=logprobs)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    sent = [call.model_dump(exclude_unset=True) for call in calls]
    begun: set[int] = set()
    for call in sent:
        if call["index"] in begun:
            assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            assert call["function"]["arguments"]
        else:
            begun.add(call["index"])
            assert call.keys() == {"index", "id", "type", "function"}
            assert call["type"] == "function" and call["function"].keys() == {"name", "arguments"}
            assert call["function"]["arguments"] == ""
    assert begun == {0, 1}


def test_an_answer_without_content_has_null(fake: FakeServer):
    fake.say(CALL)
    body = httpx.post(f"{fake.url}/v1/chat/completions", json=ASK).json()
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_that_calls_nothing_is_content(fake: FakeServer):
    fake.say("It is sunny.")
    [choice] = fake.client().chat.completions.create(**ASK).choices
    assert (choice.message.content, choice.finish_reason) == ("It is sunny.", "stop")
    assert choice.message.tool_calls is None


def test_one_call_at_a_time_if_the_caller_wants(fake: FakeServer):
    fake.say(CALL + OTHER)
    [choice] = fake.client().chat.completions.create(**ASK, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather"]


# stop string, arguments, finish reason
CUTS = [
    ("Rome", '{"city": "', "stop"),
    ("arguments", "", "stop"),
    ("</tool_call>", '{"city": "Rome"}', "tool_calls"),
    ("}}", '{"city": "Rome"', "stop"),
]


@pytest.mark.parametrize(("stop", "arguments", "finish"), CUTS, ids=[cut[0] for cut in CUTS])
def test_a_call_that_a_stop_string_cuts_short_is_not_to_be_made(
    fake: FakeServer, stop: str, arguments: str, finish: str
):
    fake.say(CALL)
    [choice] = fake.client().chat.completions.create(**ASK, stop=stop).choices
    calls = [call.function.arguments for call in choice.message.tool_calls or ()]
    assert (calls, choice.finish_reason) == ([arguments] if arguments else [], finish)
    assert not choice.message.content
    assert joined(fake, **ASK, stop=stop)[3] == finish
    fake.say(CALL + OTHER.replace("{}", '{"x": "STOP"}'))
    [choice] = fake.client().chat.completions.create(**ASK, stop="STOP").choices
    assert choice.finish_reason == "stop" and len(choice.message.tool_calls or ()) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_off_is_no_content(fake: FakeServer, stream: bool):
    fake.say("Let me look." + CALL, end=False)
    for part in ("<tool_call>", '<tool_call>\n{"name": "weat', CALL[:-1]):
        room = len(fake.tokenizer.encode("Let me look." + part))
        if stream:
            content, _, calls, finish = joined(fake, **ASK, max_tokens=room)
            names = [name for _, name, _ in calls.values()]
        else:
            [choice] = fake.client().chat.completions.create(**ASK, max_tokens=room).choices
            content, finish = choice.message.content, choice.finish_reason
            names = [call.function.name for call in choice.message.tool_calls or ()]
        assert (content, finish) == ("Let me look.", "length")
        assert names == (["weather"] if part == CALL[:-1] else [])


def test_tool_choice_none_hides_the_tools_and_leaves_marks_alone(fake: FakeServer):
    fake.say(CALL)
    [choice] = fake.client().chat.completions.create(**ASK, tool_choice="none").choices
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    assert "<tools>" not in prompt_of(fake)


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_is_named_is_called_once(
    fake: FakeServer, stream: bool, parallel: bool | None
):
    fake.say(CALL + CALL + CALL)
    body = ASK | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    if parallel is not None:
        body["parallel_tool_calls"] = parallel
    if stream:
        _, _, calls, finish = joined(fake, **body)
    else:
        [choice] = fake.client().chat.completions.create(**body).choices
        calls, finish = choice.message.tool_calls or (), choice.finish_reason
    assert len(calls) == 1 and finish == "tool_calls"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_that_the_model_sees(fake: FakeServer, mode: str):
    fake.say(OTHER)
    chosen = {"type": "function", "function": {"name": "time"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chosen]}}
    strict = {"type": "function", "function": TIME["function"] | {"strict": True}}
    body = ASK | {"tools": [WEATHER, strict]}
    [answer] = fake.client().chat.completions.create(**body, tool_choice=choice).choices
    assert [call.function.name for call in answer.message.tool_calls or ()] == ["time"]
    assert '"name": "time"' in prompt_of(fake) and '"name": "weather"' not in prompt_of(fake)
    grammar = fake.engine.requests[-1].params.grammar
    assert "arguments1" in grammar and "arguments0" not in grammar
    assert ("tail:" in grammar) == (mode == "auto"), "text around the calls"


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]},
        {"thinking_token_budget": 5},
    ],
)
def test_allowed_token_ids_together_with_a_grammar_are_refused(
    fake: FakeServer, more: dict[str, Any]
):
    """Together they may leave no next token, which the engine could only end with an error."""
    with pytest.raises(BadRequestError) as refused:
        fake.client().chat.completions.create(
            **ASK, max_tokens=50, extra_body={"allowed_token_ids": [50], **more}
        )
    assert refused.value.param == "allowed_token_ids"


def test_tokenize_makes_the_prompt_that_chat_makes(fake: FakeServer):
    last = {"role": "assistant", "content": "It is"}
    options = {"chat_template_kwargs": {"open_thought": True}}
    for fields in (
        {"tools": ASK["tools"]},
        options,
        {"messages": [*QUESTION, last], "continue_final_message": True},
    ):
        body = {"model": "fake", "messages": QUESTION, **fields}
        assert httpx.post(f"{fake.url}/v1/chat/completions", json=body).status_code == 200
        answer = httpx.post(f"{fake.url}/tokenize", json=body)
        assert answer.json()["tokens"] == fake.engine.requests[-1].tokens


def test_a_tool_loop_goes_through_the_template(fake: FakeServer):
    fake.say(CALL)
    client = fake.client()
    called = client.chat.completions.create(**ASK).choices[0].message
    assert called.tool_calls
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "22 degrees"}
    fake.say("It is 22 degrees.")
    again = [*ASK["messages"], called.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**ASK, "messages": again})
    assert answer.choices[0].message.content == "It is 22 degrees."
    assert '"arguments": {"city": "Rome"}' in prompt_of(fake)
    assert "<|tool|>22 degrees<|end|>" in prompt_of(fake)


def test_a_number_of_more_than_64_bits_comes_back_to_the_model_with_all_its_digits(
    fake: FakeServer,
):
    fake.say(HUGE_CALL)
    called = fake.client().chat.completions.create(**ASK).choices[0].message
    again = [*ASK["messages"], called.model_dump(exclude_none=True)]
    fake.client().chat.completions.create(**{**ASK, "messages": again})
    assert f'"arguments": {{"city": {HUGE}}}' in prompt_of(fake)


@pytest.mark.parametrize("size", range(1, 16))
def test_a_call_that_was_cut_short_may_be_sent_back(fake: FakeServer, size: int):
    text = '{"city": "Rome"}'[:size]
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": text}}
    said: list[Any] = [{"role": "assistant", "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "a", "content": "not run"})
    fake.client().chat.completions.create(**{**ASK, "messages": [*ASK["messages"], *said]})
    shown = f'{{"city": "{text[10:].removesuffix(chr(34))}"}}' if size > 9 else "{}"
    assert f'"arguments": {shown}}}</tool_call>' in prompt_of(fake)


NO_JSON = ("{} {", "{'city': 1", '{"city": 1,}', "Rome", '"Rome', "}", '{"city": ' + "[" * 5000)


@pytest.mark.parametrize("text", NO_JSON, ids=[text[:12] for text in NO_JSON])
def test_arguments_that_are_no_json_are_refused(fake: FakeServer, text: str):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": text}}
    again = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(BadRequestError, match="not valid JSON") as refused:
        fake.client().chat.completions.create(**{**ASK, "messages": again})
    assert refused.value.param == f"messages[{len(again) - 1}].tool_calls[0].function.arguments"


def test_an_answer_may_be_sent_back_as_clients_write_it(fake: FakeServer):
    fake.say(CALL)
    client = fake.client()
    called = client.chat.completions.create(**ASK).choices[0].message
    own = {"provider_specific_fields": {"refusal": None}}  # LiteLLM's
    for message in (called, called.model_dump(), called.model_dump() | own):
        again = [*ASK["messages"], message]
        assert client.chat.completions.create(**{**ASK, "messages": again}).choices
    again = [*ASK["messages"], called.model_dump() | {"function_call": {"name": "weather"}}]
    with pytest.raises(BadRequestError, match="must be null, not an object"):
        client.chat.completions.create(**{**ASK, "messages": again})


def test_reasoning_is_separate_under_both_names(fake: FakeServer):
    fake.say("<think>\nRome is in Italy.\n</think>\n\nSunny.")
    body = {key: value for key, value in ASK.items() if key != "tools"}
    whole = httpx.post(f"{fake.url}/v1/chat/completions", json=body).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "Sunny."
    assert message["reasoning"] == message["reasoning_content"] == "Rome is in Italy."
    usage = whole["usage"]
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (
        len(fake.tokenizer.encode("Rome is in Italy."))
        <= num_reasoning
        < usage["completion_tokens"]
    )
    assert joined(fake, **body)[:2] == ("Sunny.", "Rome is in Italy.")


def test_reasoning_may_be_left_out(fake: FakeServer):
    fake.say("<think>\nRome is in Italy.\n</think>\n\nSunny." + CALL)
    without = {"extra_body": {"include_reasoning": False}}
    whole = fake.client().chat.completions.create(**ASK, **without)
    message = whole.choices[0].message
    assert message.content == "Sunny." and message.tool_calls
    assert not {"reasoning", "reasoning_content"} & set(message.model_extra or {})
    assert whole.usage and whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens
    content, reasoning, calls, finish = joined(fake, **ASK, **without)
    assert (content, reasoning, finish) == ("Sunny.", "", "tool_calls") and len(calls) == 1


def test_reasoning_that_the_template_has_opened_needs_no_mark(fake: FakeServer):
    fake.say("Rome.\n</think>\n\nSunny." + CALL)
    options = {"extra_body": {"chat_template_kwargs": {"open_thought": True}}}
    content, reasoning, calls, finish = joined(fake, **ASK, **options)
    assert (content, reasoning, finish) == ("Sunny.", "Rome.", "tool_calls")
    assert [name for _, name, _ in calls.values()] == ["weather"]


def test_log_probabilities_cover_every_token_of_a_call(fake: FakeServer):
    fake.say(CALL, end=False)
    body = {**ASK, "logprobs": True, "max_tokens": len(fake.tokenizer.encode(CALL))}
    [choice] = fake.client().chat.completions.create(**body).choices
    assert choice.logprobs and choice.logprobs.content
    assert "".join(entry.token for entry in choice.logprobs.content) == CALL
    streamed = fake.client().chat.completions.create(**body, stream=True)
    deltas = [
        entry.token
        for chunk in streamed
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert "".join(deltas) == CALL


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_made_reaches_the_engine_as_a_grammar(fake: FakeServer, choice: Any):
    fake.say(CALL)
    fake.client().chat.completions.create(**ASK, tool_choice=choice)
    assert "arguments0" in fake.engine.requests[-1].params.grammar
    fake.client().chat.completions.create(**ASK, tool_choice="auto")
    assert fake.engine.requests[-1].params.grammar == ""
