"""Errors of a chat request name the fields of the API that the caller speaks, deep inside too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from server.apis.anthropic.schema import MessagesRequest
from server.apis.ollama.schema import OllamaChatBody, OllamaGenerateBody
from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.completions_schema import CompletionRequest
from server.apis.responses.schema import ResponsesRequest
from tests.support.examples import examples
from tests.support.server.fake_engine import fake_server
from tests.support.server.qwen_fake_model import TEMPLATE

MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
MODELS: dict[str, type[BaseModel]] = {
    MESSAGES: MessagesRequest,
    RESPONSES: ResponsesRequest,
    CHAT: OllamaChatBody,
    GENERATE: OllamaGenerateBody,
}
HELLO = [{"role": "user", "content": "Hello"}]
BASE: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "fake", "max_tokens": 5, "messages": HELLO},
    RESPONSES: {"model": "fake", "input": "Hello"},
    CHAT: {"model": "fake", "messages": HELLO, "stream": False},
    GENERATE: {"model": "fake", "prompt": "Hello", "stream": False},
}
LONG = ["x" * 1024] * 5  # more stop strings than are compared
MANY = "word " * 5000  # more than the context


def schema(value: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}}


GOOD, UNIQUE = schema({"type": "string"}), schema({"uniqueItems": True})  # that is not enforced
# Found by the library that compiles grammars, not by our own check.
NEVER = schema({"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}})
FLAT = {"type": "function", "name": "flat", "parameters": GOOD}


def anthropic_tool(name: str, of: object) -> dict[str, Any]:
    return {"name": name, "input_schema": of, "strict": True}


def chat_tool(name: str, of: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": of, "strict": True}}


def response_tool(name: str, of: object) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": of, "strict": True}


def custom_tool(definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    return {"type": "custom", "name": "custom", "format": form}


def response_format(of: object) -> dict[str, Any]:
    form = {"type": "json_schema", "name": "x", "schema": of, "strict": True}
    return {"text": {"format": form}}


CALLED: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "y"}]},
    ],
    RESPONSES: [
        *HELLO,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
    ],
    CHAT: [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "y"},
    ],
}  # fmt: skip
BROKEN = [  # the second of two calls
    *HELLO,
    *(
        {"type": "function_call", "call_id": str(n), "name": "f", "arguments": "{}"[n:]}
        for n in (0, 1)
    ),
    *({"type": "function_call_output", "call_id": str(n), "output": "y"} for n in (0, 1)),
]
DEEP = "properties.a.uniqueItems"

# route, change, the first field of the message, other words of it
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (MESSAGES, {"stop_sequences": LONG}, "stop_sequences", "characters in all"),
    (MESSAGES, {"tools": [anthropic_tool("a", GOOD), anthropic_tool("b", UNIQUE)]},
     f"tools[1].input_schema.{DEEP}", "cannot be enforced"),
    (MESSAGES, {"tools": [anthropic_tool("a", GOOD), anthropic_tool("b", NEVER)]},
     "tools[1].input_schema.properties.a.properties.b", "cannot be enforced"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}},
     f"output_config.format.schema.{DEEP}", "cannot be enforced"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": NEVER}}},
     "output_config.format.schema.properties.a.properties.b", "cannot be enforced"),
    (RESPONSES, {"stop": LONG}, "stop", "characters in all"),
    (RESPONSES, {"min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "`max_output_tokens`"),
    (RESPONSES, {"input": BROKEN}, "input[2].arguments", "not valid JSON"),
    (RESPONSES, {"tools": [FLAT, response_tool("b", UNIQUE)]},
     f"tools[1].parameters.{DEEP}", "cannot be enforced"),
    (RESPONSES, {"tools": [FLAT, response_tool("b", NEVER)], "tool_choice": {
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}},
     "tools[1].parameters.properties.a.properties.b", "cannot be enforced"),
    (RESPONSES, {"tools": [FLAT, FLAT]}, "tools[1].name", "an earlier tool"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice", "names the function g"),
    (RESPONSES, {"tools": [FLAT, custom_tool("start: (")]},
     "tools[1].format.definition", "cannot be used"),
    (RESPONSES, {"tools": [custom_tool("x") | {"format": {"type": "grammar"}}]},
     "tools[0].format", "required for type grammar"),
    (RESPONSES, response_format(UNIQUE), f"text.format.schema.{DEEP}", "cannot be enforced"),
    (RESPONSES, response_format(NEVER), "text.format.schema.properties.a.properties.b", "enforced"),
    (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity", "no place for it"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort", "no place for it"),
    (CHAT, {"options": {"stop": LONG}}, "options.stop", "characters in all"),
    (CHAT, {"format": UNIQUE}, f"format.{DEEP}", "cannot be enforced"),
    (CHAT, {"format": NEVER}, "format.properties.a.properties.b", "cannot be enforced"),
    (CHAT, {"tools": [chat_tool("a", GOOD), chat_tool("b", UNIQUE)]},
     f"tools[1].function.parameters.{DEEP}", "cannot be enforced"),
    (CHAT, {"messages": [HELLO[0] | {"thinking": "x"}]}, "messages[0].thinking", "role assistant"),
    (GENERATE, {"format": NEVER}, "format.properties.a.properties.b", "cannot be enforced"),
    (GENERATE, {"options": {"stop": LONG}}, "options.stop", "characters in all"),
    (GENERATE, {"raw": True, "options": {"stop": LONG}}, "options.stop", "characters in all"),
    (GENERATE, {"raw": True, "logprobs": True, "top_logprobs": 9}, "top_logprobs", "at most 5"),
]  # fmt: skip
# with a template that has no place for calls and results
PLAIN_ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (MESSAGES, {"messages": CALLED[MESSAGES]}, "messages[1].content", "no place for tool calls"),
    (RESPONSES, {"input": CALLED[RESPONSES]}, "input[1]", "no place for tool calls"),
    (CHAT, {"messages": CALLED[CHAT]}, "messages[1].tool_calls", "no place for tool calls"),
    (CHAT, {"messages": [*HELLO, CALLED[CHAT][2]]}, "messages[1].role", "is tool"),
    (MESSAGES, {"tools": [anthropic_tool("a", GOOD)]}, "tools", "no place for tools"),
    (CHAT, {"tools": [chat_tool("a", GOOD)]}, "tools", "no place for tools"),
]
# with a template that prints no content as it is
UPPER_ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (route, {"messages": [*HELLO, {"role": "assistant", "content": "so"}]}, "messages", "final")
    for route in (MESSAGES, CHAT)
]
# of a model without one
NO_ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (route, {}, field, "no chat template")
    for route, field in (
        *((MESSAGES, "messages"), (RESPONSES, "input"), (CHAT, "messages"), (GENERATE, "prompt")),
    )
]
BARE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
UPPER = "{% for message in messages %}{{ message.content | upper }}<|end|>{% endfor %}"
TEMPLATES = {"full": TEMPLATE, "bare": BARE, "upper": UPPER, "none": None}
ALL = [
    (template, *row)
    for template, rows in zip(TEMPLATES, (ROWS, PLAIN_ROWS, UPPER_ROWS, NO_ROWS), strict=True)
    for row in rows
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    clients: dict[str, httpx.Client] = {}
    blocks = [
        fake_server(tmp_path_factory.mktemp(name), template=template, context=2000)
        for name, template in TEMPLATES.items()
    ]
    for name, block in zip(TEMPLATES, blocks, strict=True):
        clients[name] = httpx.Client(base_url=block.__enter__().url, timeout=60)
    yield clients
    for client, block in zip(clients.values(), blocks, strict=True):
        client.close()
        block.__exit__(None, None, None)


def told(answer: httpx.Response) -> tuple[str, str | None]:
    """The message of an error, and its param where the API has one."""
    error = answer.json()["error"]
    return (error, None) if isinstance(error, str) else (error["message"], error.get("param"))


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}")
def test_a_fault_deep_inside_is_reported_with_the_callers_field(
    servers: dict[str, httpx.Client], row: tuple[str, str, dict[str, Any], str, str]
):
    template, route, change, field, words = row
    body = BASE[route] | change
    answer = servers[template].post(route, json=body)
    assert answer.status_code == 400, answer.text
    message, param = told(answer)
    assert words in message
    assert re.findall("`([^`]+)`", message)[0] in (field, "uniqueItems"), message
    assert f"`{field}`" in message and (param is None or param.startswith(field)), answer.text
    check_fields(route, body, answer)


@pytest.mark.parametrize(
    ("route", "change", "fields"),
    [
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2,
                     "max_output_tokens": 9}, ["max_output_tokens", "top_logprobs", "stream"]),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 9}},
         ["options.num_predict", "top_logprobs", "stream"]),
        (GENERATE, {"raw": True, "logprobs": True, "top_logprobs": 2,
                    "options": {"num_predict": 9}},
         ["options.num_predict", "top_logprobs", "stream"]),
    ],
)  # fmt: skip
def test_what_to_lower_is_named_as_the_caller_does(
    servers: dict[str, httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    change: dict[str, Any],
    fields: list[str],
):
    monkeypatch.setattr("server.generation.logprobs.MAX_SCORES", 8)
    message, _ = told(servers["full"].post(route, json=BASE[route] | change))
    assert re.findall("`([^`]+)`", message) == fields, message


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES, CHAT, GENERATE])
def test_a_long_prompt_is_reported_with_the_callers_field(
    servers: dict[str, httpx.Client], route: str
):
    field = {MESSAGES: "messages", RESPONSES: "input", CHAT: "messages", GENERATE: "prompt"}[route]
    long: object = MANY if route in (RESPONSES, GENERATE) else [HELLO[0] | {"content": MANY}]
    answer = servers["full"].post(route, json=BASE[route] | {field: long})
    message, param = told(answer)
    words = "prompt is too long" if route == MESSAGES else "the prompt has"
    assert answer.status_code == 400 and words in message
    assert param in (None, field) and "`" not in message, answer.text


def names_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


CHATS = names_of(ChatRequest) | names_of(CompletionRequest)
STEP = re.compile(r"\.?([A-Za-z_$]+)|\[(\d+)\]")


def check_fields(route: str, body: dict[str, Any], answer: httpx.Response) -> None:
    """No field of the chat API that was not sent, and paths that are in the body."""
    sent = json.dumps(body)
    message, param = told(answer)
    message = message.replace("/v1/completions with a `prompt`", "")  # of another route
    for path in [*re.findall("`([^`]+)`", message), param or ""]:
        root = re.match(r"\w*", path)
        assert root is not None
        if root[0] not in CHATS | names_of(MODELS[route]) or "..." in path:
            continue
        assert root[0] in names_of(MODELS[route]) or f'"{root[0]}"' in sent, message
        steps = [int(step[2]) if step[2] else step[1] for step in STEP.finditer(path)]
        if "".join(step[0] for step in STEP.finditer(path)) != path or path in WHOLE:
            continue
        inside: Any = body
        for step in steps[:-1]:
            assert isinstance(inside, list if isinstance(step, int) else dict), (path, message)
            assert isinstance(step, int) or step in inside, (path, message)
            inside = inside[step]


# Hints name these whether they were sent or not.
WHOLE = {"options.num_predict", "text.format", "reasoning.effort"}


def some(*options: object) -> st.SearchStrategy[Any]:
    return st.sampled_from(options)


SCHEMAS = some(GOOD, UNIQUE, NEVER, schema({"not": {}}), schema({"enum": []}), {"type": "array"})
TURNS = some(HELLO, [*HELLO, {"role": "assistant", "content": "so"}], MANY)
NUMBERS = some(None, 0, 1, 9, 2000, -1, 0.5)
PARTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    MESSAGES: {
        "messages": TURNS | st.just(CALLED[MESSAGES]),
        "system": some("x", [{"type": "text", "text": "x"}]),
        "stop_sequences": some(LONG, ["x"]),
        "tools": st.lists(st.builds(anthropic_tool, some("a", "b"), SCHEMAS), max_size=2),
        "tool_choice": some({"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "a"}),
        "output_config": SCHEMAS.map(lambda s: {"format": {"type": "json_schema", "schema": s}}),
        "thinking": some({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
        "max_tokens": NUMBERS,
        "top_k": NUMBERS,
    },
    RESPONSES: {
        "input": TURNS | some(CALLED[RESPONSES], BROKEN),
        "instructions": some("x"),
        "stop": some(LONG, ["x"]),
        "tools": st.lists(
            st.builds(response_tool, some("a", "b"), SCHEMAS)
            | st.builds(custom_tool, some("start: (", 'start: "a"')), max_size=2),
        "tool_choice": some("required", {"type": "function", "name": "a"}, {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}),
        "text": SCHEMAS.map(lambda s: response_format(s)["text"]),
        "reasoning": some({"effort": "high"}, {"effort": "none"}),
        "truncation": some("auto"),
        "max_output_tokens": NUMBERS,
        "min_tokens": NUMBERS,
        "top_logprobs": NUMBERS,
        "chat_template_kwargs": some({"a": 1}, {"messages": 1}, {"enable_thinking": True}),
    },
    CHAT: {
        "messages": TURNS | st.just(CALLED[CHAT]),
        "options": some({"stop": LONG}, {"num_predict": 900}, {"num_ctx": 8}, {"top_k": 3}),
        "tools": st.lists(st.builds(chat_tool, some("a", "b"), SCHEMAS), max_size=2),
        "format": SCHEMAS,
        "think": some(True, False, "low"),
        "logprobs": some(True),
        "top_logprobs": NUMBERS,
    },
    GENERATE: {
        "prompt": some("x", MANY),
        "system": some("x"),
        "raw": some(True),
        "suffix": some("x"),
        "options": some({"stop": LONG}, {"num_predict": 900}, {"num_ctx": 8}, {"top_k": 3}),
        "format": SCHEMAS,
        "think": some(True, False, "low"),
        "logprobs": some(True),
        "top_logprobs": NUMBERS,
    },
}  # fmt: skip
JUNK = some(None, True, 3, -1, 1e9, "", "x", [], {}, [3], {"x": 3}, [[]], "response_formats")


def mutated(data: st.DataObject, value: Any) -> Any:
    """A copy in which one place holds something else, or nothing."""
    if isinstance(value, dict | list) and value and data.draw(some(True, True, False)):
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        copy: Any = value.copy()
        key = data.draw(st.sampled_from(keys))
        if isinstance(value, dict) and data.draw(some(False, False, True)):
            del copy[key]
        else:
            copy[key] = mutated(data, value[key])
        return copy
    return data.draw(JUNK)


@examples(400)
@given(template=st.sampled_from(list(TEMPLATES)), route=st.sampled_from(list(BASE)), data=st.data())
def test_no_error_names_a_field_of_chat_that_was_not_sent(
    servers: dict[str, httpx.Client], template: str, route: str, data: st.DataObject
):
    parts = data.draw(st.lists(st.sampled_from(list(PARTS[route])), max_size=3, unique=True))
    body = BASE[route] | {name: data.draw(PARTS[route][name]) for name in parts}
    if data.draw(st.booleans()):
        body = mutated(data, body)
    headers = {"content-type": "application/json"}
    answer = servers[template].post(route, content=json.dumps(body), headers=headers)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200 and isinstance(body, dict):
        check_fields(route, body, answer)
