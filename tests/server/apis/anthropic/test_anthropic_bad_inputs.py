"""The error of each wrong body of /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import CONTEXT, FakeServer
from tests.support.server.malformed_requests import REMOVED

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BASE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Hello"}],
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
M0 = "`messages[0]"
B0 = f"{M0}.content[0]"


def turns(*messages: tuple[str, object]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def user(content: object) -> dict[str, Any]:
    return turns(("user", content))


# what is changed in a good body, words that the message has
ROWS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # required fields and types
    ({"model": REMOVED}, ("`model` is required",)),
    ({"messages": REMOVED}, ("`messages` is required",)),
    ({"max_tokens": REMOVED}, ("`max_tokens` is required",)),
    ({"model": 7}, ("`model`", "a string, not 7")),
    ({"messages": "Hello"}, ("`messages`", "an array")),
    ({"messages": []}, ("`messages`", "at least 1")),
    ({"messages": ["Hello"]}, (M0, "an object")),
    ({"messages": [{"content": "x"}]}, (f"{M0}.role` is required",)),
    ({"messages": [{"role": "user"}]}, (f"{M0}.content` is required",)),
    (turns(("king", "x")), (f"{M0}.role`", "'user'")),
    (turns(("tool", "x")), (f"{M0}.role`", "'assistant'")),
    (user(5), (f"{M0}.content`", "a string or an array of content blocks")),
    (user([]), (f"{M0}.content`", "at least 1")),
    (user(["x"]), (f"{B0}`", "an object")),
    (user([{"text": "x"}]), (f"{B0}.type` is required",)),
    (user([{"type": "poem", "text": "x"}]), (f"{B0}.type`", "'text'")),
    (user([{"type": "text"}]), (f"{B0}.text` is required",)),
    (user([{"type": "text", "text": 1}]), (f"{B0}.text`", "a string")),
    (user([{"type": "text", "text": "x", "mood": 1}]), (f"{B0}.mood`", "not a parameter")),
    (user([{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]),
     (f"{B0}.cache_control.type`", "'ephemeral'")),
    (user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "9m"}}]),
     ("ttl`", "'5m' or '1h'")),
    (user([{"type": "text", "text": "x", "citations": [{}]}]), (f"{B0}.citations`", "at most 0")),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, (f"{M0}.name`",)),
    # what this model or this server has not
    (user([{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}]),
     (f"{B0}.type` is image", "text only")),
    (user([{"type": "document", "source": {}}]), (f"{B0}.type` is document", "text only")),
    (user([{"type": "search_result"}]), (f"{B0}.type` is search_result",)),
    (user([{**RESULT, "content": [{"type": "image", "source": {}}]}]),
     (f"{B0}.content[0].type` is image",)),
    (user([{"type": "server_tool_use"}]), (f"{B0}.type` is server_tool_use", "leave it out")),
    (turns(("user", "x"), ("assistant", [{"type": "redacted_thinking", "data": "x"}])),
     ("`messages[1].content[0].type` is redacted_thinking",)),
    ({"output_config": {"effort": "low"}}, ("`output_config.effort` is low", "high")),
    ({"output_config": {"effort": "huge"}}, ("`output_config.effort`", "'xhigh'")),
    ({"output_config": {"format": {"type": "json_schema"}}},
     ("`output_config.format.schema` is required",)),
    ({"output_config": {"format": {"type": "text", "schema": {}}}},
     ("`output_config.format.type`", "'json_schema'")),
    ({"output_config": {"format": {"type": "json_schema",
                                   "schema": {"properties": {"a": {"uniqueItems": True}}}}}},
     ("`output_config.format.schema.properties.a.uniqueItems`", "cannot be enforced")),
    ({"container": "c"}, ("`container` is not supported",)),
    ({"context_management": {"edits": []}}, ("`context_management` is not supported",)),
    ({"mcp_servers": [{}]}, ("`mcp_servers` is not supported", "tools")),
    ({"inference_geo": "eu"}, ("`inference_geo` is not supported",)),
    ({"fallbacks": [{"model": "x"}]}, ("`fallbacks` is not supported",)),
    ({"fallback_credit_token": "x"}, ("`fallback_credit_token` is not supported",)),
    ({"compaction": {}}, ("`compaction` is not supported", "`messages`")),
    ({"billing_policy": {}}, ("`billing_policy` is not supported",)),
    ({"speed": "fast"}, ("`speed` is not supported", "standard")),
    ({"service_tier": "priority"}, ("`service_tier`", "'standard_only'")),
    # the order of turns
    (turns(("user", "x"), ("assistant", [CALL])), ("`messages[1]`", "results after it")),
    (turns(("user", "x"), ("assistant", " ")), ("`messages[1]`", "no text")),
    (turns(("user", [RESULT])), (f"{B0}.tool_use_id` is t1", "no earlier")),
    (turns(("user", [CALL])), (f"{B0}`", "belongs to role assistant")),
    (turns(("assistant", [RESULT])), (f"{B0}`", "belongs to role user")),
    (turns(("user", "x"), ("assistant", [CALL]), ("user", [{"type": "text", "text": "y"}, RESULT])),
     ("`messages[2].content[1]`", "results first")),
    (turns(("user", "x"), ("assistant", [{**CALL, "input": "{}"}])), ("content[0].input`",)),
    (turns(("user", "x"), ("assistant", [{**CALL, "id": ""}])), ("content[0].id`", "at least 1")),
    # numbers
    ({"max_tokens": 0}, ("`max_tokens` is 0", "at least 1")),
    ({"max_tokens": "5"}, ("`max_tokens`", "an integer")),
    ({"max_tokens": 1.5}, ("`max_tokens`", "an integer")),
    (user("word " * 400), ("prompt is too long: 804", f" tokens > {CONTEXT - 1} maximum")),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1024}] * 17},
     ("`messages`", "more than 16384")),
    ({"temperature": 1.1}, ("`temperature` is 1.1", "at most 1")),
    ({"temperature": -1}, ("`temperature`", "at least 0")),
    ({"temperature": "hot"}, ("`temperature`", "a number")),
    ({"top_p": -0.1}, ("`top_p`", "at least 0")),
    ({"top_p": 1.5}, ("`top_p`", "at most 1")),
    ({"top_k": -1}, ("`top_k`", "at least 0")),
    ({"top_k": 1.5}, ("`top_k`", "an integer")),
    ({"stop_sequences": "x"}, ("`stop_sequences`", "an array")),
    ({"stop_sequences": ["a"] * 33}, ("`stop_sequences` has 33", "at most 32")),
    ({"stop_sequences": ["a" * 999] * 5}, ("`stop_sequences` has 4995", "at most 4096")),
    ({"stop_sequences": [""]}, ("`stop_sequences[0]`", "at least 1")),
    ({"stream": "yes"}, ("`stream`", "true or false")),
    ({"metadata": {"user": "x"}}, ("`metadata.user`", "not a parameter")),
    ({"metadata": {"user_id": 5}}, ("`metadata.user_id`", "a string")),
    # system
    ({"system": 5}, ("`system`", "a string or an array of text blocks")),
    ({"system": [{"type": "image"}]}, ("`system[0].type`", "'text'")),
    # tools
    ({"tools": {}}, ("`tools`", "an array")),
    ({"tools": [{"name": "f"}]}, ("`tools[0].input_schema` is required",)),
    ({"tools": [{"input_schema": {}}]}, ("`tools[0].name` is required",)),
    ({"tools": [TOOL, TOOL]}, ("`tools[1].name` is f", "an earlier tool")),
    ({"tools": [{**TOOL, "name": "a b"}]}, ("`tools[0].name`",)),
    ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, ("`tools[0].input_schema`",)),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     ("`tools[0].type` is web_search_20250305", "of your own")),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("`tools[0].type` is bash_20250124",)),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, ("`tools[0].input_examples`",)),
    ({"tools": [{**TOOL, "defer_loading": True}]}, ("`tools[0].defer_loading`", "False")),
    ({"tool_choice": {"type": "any"}}, ("`tool_choice` needs `tools`",)),
    ({"tools": [TOOL], "tool_choice": "auto"}, ("`tool_choice`", "an object")),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, ("`tool_choice.type`", "'any'")),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, ("`tool_choice.name`", "type tool")),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
     ("`tool_choice.name` is g", "(f)")),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, ("`tool_choice.name`",)),
    ({"tools": [TOOL], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
     ("`tool_choice.disable_parallel_tool_use`",)),
    # thinking
    ({"thinking": True}, ("`thinking`", "an object")),
    ({"thinking": {"type": "deep"}}, ("`thinking.type`", "'adaptive'")),
    ({"thinking": {"type": "enabled"}}, ("`thinking.budget_tokens`", "type enabled")),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}},
     ("`thinking.budget_tokens` is 5", "at least 1024")),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}},
     ("`thinking.budget_tokens` is 2000", "less than `max_tokens`, here 20")),
    ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, ("`thinking.budget_tokens`",)),
    ({"thinking": {"type": "adaptive"}}, ("`thinking`", "cannot switch thinking on")),
    # unknown fields
    ({"max_token": 5}, ("`max_token`", "did you mean `max_tokens`")),
    ({"seed": 5}, ("`seed`", "not a parameter")),
    ({"n": 2}, ("`n`", "not a parameter")),
]  # fmt: skip


def check(answer: httpx.Response, status: int, kind: str, words: tuple[str, ...]) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"]
    for word in words:
        assert word in body["error"]["message"], body
    assert len(body["error"]["message"]) < 600


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{repr(row[0])[:60]}")
def test_a_wrong_field_is_refused_by_name(
    fake: FakeServer, http: httpx.Client, row: tuple[dict[str, Any], tuple[str, ...]]
):
    change, words = row
    body = {name: value for name, value in (BASE | change).items() if value is not REMOVED}
    submitted = len(fake.engine.requests)
    headers = {"content-type": "application/json"}
    answer = http.post(ROUTE, content=json.dumps(body), headers=headers)
    check(answer, 400, "invalid_request_error", words)
    assert len(fake.engine.requests) == submitted, "a refused request reached the engine"


@pytest.mark.parametrize("path", [ROUTE, COUNT])
def test_bodies_that_are_not_json_objects_are_refused(http: httpx.Client, path: str):
    json_type = {"content-type": "application/json"}
    for content, words in ((b"", "empty"), (b"{", "line 1"), (b"[]", "array"), (b"\xff", "UTF-8")):
        answer = http.post(path, content=content, headers=json_type)
        check(answer, 400, "invalid_request_error", (words,))
    answer = http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    check(answer, 415, "invalid_request_error", ("application/json",))


def test_an_unknown_model_and_route_are_not_found(http: httpx.Client):
    answer = http.post(ROUTE, json=BASE | {"model": "big"})
    check(answer, 404, "not_found_error", ("`big`", "`fake`"))
    answer = http.get(f"{ROUTE}/batches")
    check(answer, 404, "not_found_error", ("/v1/messages/batches",))
    check(http.get(ROUTE), 405, "invalid_request_error", ("GET",))


def test_the_counting_route_takes_no_sampling_parameters(http: httpx.Client):
    answer = http.post(COUNT, json=BASE)
    check(answer, 400, "invalid_request_error", ("`max_tokens`", "not a parameter"))


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"cache_control": {"type": "ephemeral"}, "system": ""},
        {"temperature": None, "stop_sequences": [], "top_k": 0, "tools": []},
        {"speed": "standard", "container": None, "output_config": {"effort": "high"}},
        turns(("user", "x"), ("system", "be brief"), ("user", "y")),
        user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]),
    ],
)
def test_what_asks_for_nothing_unusual_is_taken(http: httpx.Client, change: dict[str, Any]):
    answer = http.post(ROUTE, json=BASE | change)
    assert answer.status_code == 200, answer.text


def test_a_client_that_keeps_threads_gets_an_error_that_says_to_go_on_without(http: httpx.Client):
    """Anthropic's tool runner begins a thread by itself, and reads the details of the refusal."""
    error = http.post(ROUTE, json=BASE | {"thread": {"type": "create"}}).json()["error"]
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert "`thread` is not supported" in error["message"] and "all `messages`" in error["message"]
    assert "details" not in http.post(ROUTE, json=BASE | {"max_tokens": 0}).json()["error"]
