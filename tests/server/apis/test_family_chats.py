"""Chats with the template of a model family, through the whole server."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.families.model_families import FAMILIES, WITHOUT_TOOLS, write_family
from tests.support.server.fake_engine import FakeServer, fake_server

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
QUESTION: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
BODY: dict[str, Any] = {"model": "fake", "messages": QUESTION}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
JSON = '{"city": "Rome", "days": 2}'
THOUGHT = "<think>\nRome.\n</think>\n\n"
# What a model answers to the question, the token that ends it included.
SAID = {
    "qwen3_moe": THOUGHT
    + f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call><|im_end|>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "mixtral_8x22b": f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}]</s>',
    "gpt_oss": "<|channel|>analysis<|message|>Rome.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
    "glm45": "\n<think>Rome.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call><|observation|>",
    "gemma3_tools": '[weather(city="Rome", days=2)]<end_of_turn>',
}
Serve = Callable[[str], FakeServer]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server of the family, with a context for tools."""
    started: dict[str, FakeServer] = {}
    with contextlib.ExitStack() as stack:

        def server(name: str) -> FakeServer:
            if name not in started:
                folder = write_family(tmp_path_factory.mktemp(name), name)
                started[name] = stack.enter_context(
                    fake_server(folder, prepared=True, context=4096)
                )
            started[name].reset()
            return started[name]

        yield server


@pytest.fixture(params=list(SAID))
def family(request: pytest.FixtureRequest, serve: Serve) -> tuple[str, FakeServer]:
    """It has answered, and would go on behind the end of its answer."""
    server = serve(request.param)
    server.say(SAID[request.param] + " And more.", end=False)
    return request.param, server


def refused(server: FakeServer, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_call_comes_out_and_ends_the_answer(family: tuple[str, FakeServer], choice: Any):
    name, server = family
    with contextlib.closing(server.client()) as client:
        answer = client.chat.completions.create(**BODY, tools=[WEATHER], tool_choice=choice)
    [only] = answer.choices
    assert only.finish_reason == "tool_calls" and not only.message.content
    [call] = only.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == json.loads(JSON)
    reasons = FAMILIES[name].reasoning is not None
    assert (only.message.model_extra or {}).get("reasoning") == ("Rome." if reasons else None)
    assert bool(server.engine.requests[-1].params.grammar) == (choice != "auto")


def test_a_streamed_call_is_the_same(family: tuple[str, FakeServer]):
    name, server = family
    with contextlib.closing(server.client()) as client:
        stream = client.chat.completions.create(**BODY, tools=[WEATHER], stream=True)
        deltas = [chunk.choices[0] for chunk in stream if chunk.choices]
    calls = [call for each in deltas for call in each.delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id and call.function] == ["weather"]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == json.loads(JSON)
    assert not any(each.delta.content for each in deltas)
    assert deltas[-1].finish_reason == "tool_calls"
    thought = "".join((each.delta.model_extra or {}).get("reasoning") or "" for each in deltas)
    assert thought == ("Rome." if FAMILIES[name].reasoning else "")


def test_the_call_and_its_result_can_be_sent_back(family: tuple[str, FakeServer]):
    _, server = family
    with contextlib.closing(server.client()) as client:
        first = client.chat.completions.create(**BODY, tools=[WEATHER]).choices[0].message
        [call] = first.tool_calls or []
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
        messages = [*QUESTION, first, result]
        client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    prompt = server.tokenizer.decode(server.engine.requests[-1].tokens, skip_special=False)
    assert "Rome" in prompt.split("Weather in Rome?")[1]
    assert prompt.rindex("It is sunny.") > prompt.rindex("Weather in Rome?")


@pytest.mark.parametrize(
    ("name", "end"), [("qwen3_moe", "<think>\n\n</think>\n\n"), ("glm45", "\n<think></think>")]
)
def test_no_effort_switches_reasoning_off(serve: Serve, name: str, end: str):
    server = serve(name)
    server.say("Sunny." + FAMILIES[name].ends[0], end=False)
    with contextlib.closing(server.client()) as client:
        answer = client.chat.completions.create(**BODY, reasoning_effort="none").choices[0]
    assert answer.message.content == "Sunny."
    prompt = server.tokenizer.decode(server.engine.requests[-1].tokens, skip_special=False)
    assert prompt.endswith(end)


def test_a_call_in_a_code_block_is_content(serve: Serve):
    server = serve("gemma3_tools")
    server.say('```tool_code\n[weather(city="Rome", days=2)]\n```<end_of_turn>', end=False)
    with contextlib.closing(server.client()) as client:
        answer = client.chat.completions.create(**BODY, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    assert "weather(" in (answer.message.content or "")


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_family_without_tools_refuses_them_by_name(serve: Serve, name: str):
    error = refused(serve(name), tools=[WEATHER])
    assert error["param"] == "tools" and "no place for tools" in error["message"]
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    error = refused(serve(name), messages=[*QUESTION, result])
    assert error["param"] == "messages[1].role" and "user message" in error["message"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_gemma_2_refuses_a_system_message_with_the_words_of_its_template(serve: Serve, role: str):
    messages = [{"role": role, "content": "Be brief."}, *QUESTION]
    error = refused(serve("gemma2"), messages=messages)
    assert error["param"] == "messages"
    assert "There is no role system: change them" in error["message"]


@pytest.mark.parametrize("level", ["none", "minimal", "xhigh", "max"])
def test_gpt_oss_refuses_an_effort_that_it_does_not_know(serve: Serve, level: str):
    server = serve("gpt_oss")
    for fields, param in (
        ({"reasoning_effort": level}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": level}},
         "chat_template_kwargs.reasoning_effort"),
    ):  # fmt: skip
        error = refused(server, **fields)
        assert error["param"] == param
        assert f"is {level}: this model reasons at the levels low, medium, high" in error["message"]


@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_gpt_oss_reads_its_effort(serve: Serve, level: Any):
    server = serve("gpt_oss")
    client: openai.OpenAI = server.client()
    client.chat.completions.create(**BODY, reasoning_effort=level)
    prompt = server.tokenizer.decode(server.engine.requests[-1].tokens, skip_special=False)
    assert f"Reasoning: {level}\n" in prompt


def test_gpt_oss_refuses_tools_that_the_server_would_have_to_run(serve: Serve):
    error = refused(serve("gpt_oss"), chat_template_kwargs={"builtin_tools": "python"})
    assert error["param"] == "chat_template_kwargs.builtin_tools"
    assert "offer functions in `tools`" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "none"}}, "`reasoning.effort`"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "`thinking`: .* thinking off"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "`output_config.effort` is max"),
        ("/api/chat", {"think": False}, "`think`: .* thinking off"),
    ],
)
def test_the_other_apis_refuse_it_by_their_own_names(
    serve: Serve, path: str, fields: dict[str, Any], words: str
):
    chat = {"messages": QUESTION} | ({"max_tokens": 9} if path == "/v1/messages" else {})
    body = {"model": "fake"} | ({} if "input" in fields else chat) | fields
    answer = httpx.post(serve("gpt_oss").url + path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert re.search(words, error if isinstance(error, str) else error["message"])
