"""The error of each wrong body of Ollama's routes."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import CONTEXT, HIDDEN, FakeServer
from tests.support.server.malformed_requests import REMOVED

CHAT = "/api/chat"
TEXT = "/api/generate"
SHOW = "/api/show"
EMBED = "/api/embed"
OLDER = "/api/embeddings"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"model": "fake", "prompt": "Hello"},
    SHOW: {"model": "fake"},
    EMBED: {"model": "fake", "input": "Hello"},
    OLDER: {"model": "fake", "prompt": "Hello"},
}
M0 = "`messages[0]"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def options(**values: object) -> dict[str, Any]:
    return {"options": values}


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


# route, what is changed in a good body, words that the message has
ROWS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # required fields and types
    (CHAT, {"model": REMOVED}, ("`model` is required",)),
    (TEXT, {"model": REMOVED}, ("`model` is required",)),
    (SHOW, {"model": REMOVED}, ("`model` is required",)),
    (TEXT, {"model": ""}, ("`model`", "at least 1")),
    (CHAT, {"model": 7}, ("`model`", "a string, not 7")),
    (CHAT, {"messages": "Hello"}, ("`messages`", "an array")),
    (CHAT, {"messages": ["Hello"]}, (M0, "an object")),
    (CHAT, {"messages": [{"content": "x"}]}, (f"{M0}.role` is required",)),
    (CHAT, message(role="king"), (f"{M0}.role`", "'user'")),
    (CHAT, message(role="developer"), (f"{M0}.role`", "'system'")),
    (CHAT, message(content=5), (f"{M0}.content`", "a string")),
    (CHAT, message(content=[{"type": "text", "text": "x"}]), (f"{M0}.content`", "a string")),
    (CHAT, message(content=None), (f"{M0}.content` is required",)),
    (CHAT, message(mood="glad"), (f"{M0}.mood`", "not a parameter")),
    (CHAT, message(role="assistant", content=" "), (M0, "no text")),
    (CHAT, message(tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
     (f"{M0}.tool_calls`", "role assistant")),
    (CHAT, message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
     ("tool_calls[0].function.arguments`", "an object")),
    (CHAT, message(role="assistant", tool_calls=[{"function": {"arguments": {}}}]),
     ("tool_calls[0].function.name` is required",)),
    (TEXT, {"prompt": ["a"]}, ("`prompt`", "a string")),
    (TEXT, {"prompt": 5}, ("`prompt`", "a string")),
    (TEXT, {"system": 5}, ("`system`", "a string")),
    (CHAT, {"stream": "no"}, ("`stream`", "true or false")),
    (CHAT, {"keep_alive": "soon"}, ("`keep_alive`", "5m")),
    (CHAT, {"keep_alive": "5 m"}, ("`keep_alive`", "a duration")),
    (CHAT, {"keep_alive": 64 * "1" + "x"}, ("`keep_alive`", "5m")),  # in no more time than others
    (CHAT, {"keep_alive": 64 * "1.1m" + "x"}, ("`keep_alive`", "5m")),
    (CHAT, {"keep_alive": {}}, ("`keep_alive`", "a duration")),
    (CHAT, {"keep_alive": True}, ("`keep_alive`", "a number")),
    (TEXT, {"prompt": "", "keep_alive": 0}, ("`keep_alive` is 0", "unload")),
    (CHAT, {"messages": [], "keep_alive": "0s"}, ("`keep_alive` is 0", "unload")),
    # options
    (CHAT, {"options": []}, ("`options`", "an object")),
    (CHAT, options(temperature=-1), ("`options.temperature`", "at least 0")),
    (CHAT, options(temperature=3), ("`options.temperature`", "at most 2")),
    (CHAT, options(temperature="hot"), ("`options.temperature`", "a number")),
    (TEXT, options(top_k=-1), ("`options.top_k`", "at least 0")),
    (TEXT, options(top_k=0.5), ("`options.top_k`", "an integer")),
    (TEXT, options(top_p=-0.1), ("`options.top_p`", "at least 0")),
    (TEXT, options(top_p=2), ("`options.top_p`", "at most 1")),
    (TEXT, options(min_p=2), ("`options.min_p`", "at most 1")),
    (TEXT, options(seed=-2), ("`options.seed`", "at least -1")),
    (TEXT, options(seed="x"), ("`options.seed`", "an integer")),
    (TEXT, options(num_predict=0), ("`options.num_predict` is 0", "-1")),
    (TEXT, options(num_predict=-3), ("`options.num_predict`", "at least -2")),
    (TEXT, options(stop=5), ("`options.stop`", "a string or an array")),
    (TEXT, options(stop=["a"] * 33), ("`options.stop` has 33", "at most 32")),
    (TEXT, options(stop=["a" * 999] * 5), ("`options.stop` has 4995", "at most 4096")),
    (TEXT, options(stop=[""]), ("`options.stop[0]`", "at least 1")),
    (TEXT, options(repeat_penalty=0), ("`options.repeat_penalty`", "at least 0.01")),
    (TEXT, options(presence_penalty=3), ("`options.presence_penalty`", "at most 2")),
    (TEXT, options(frequency_penalty=-3), ("`options.frequency_penalty`", "at least -2")),
    (TEXT, options(num_ctx=CONTEXT + 1), (f"`options.num_ctx` is {CONTEXT + 1}", f"{CONTEXT}")),
    (TEXT, options(num_ctx=0), ("`options.num_ctx`", "at least 1")),
    (TEXT, options(num_gpu="all"), ("`options.num_gpu`", "an integer")),
    (CHAT, options(mirostat=1), ("`options.mirostat` is not supported", "min_p")),
    (CHAT, options(mirostat_tau=5.0), ("`options.mirostat_tau` is not supported",)),
    (CHAT, options(tfs_z=0.5), ("`options.tfs_z` is not supported",)),
    (CHAT, options(typical_p=0.7), ("`options.typical_p` is not supported",)),
    (CHAT, options(repeat_last_n=64), ("`options.repeat_last_n` is not supported", "-1")),
    (CHAT, options(penalize_newline=False), ("`options.penalize_newline` is not supported",)),
    (CHAT, options(temprature=1), ("`options.temprature`", "not a parameter")),
    # what this model or this server has not
    (CHAT, message(images=["aGk="]), (f"{M0}.images`", "text only")),
    (TEXT, {"images": ["aGk="]}, ("`images`", "text only")),
    (TEXT, {"template": "{{ .Prompt }}"}, ("`template` is not supported", "own chat template")),
    (TEXT, {"context": [1, 2]}, ("`context` is not supported", "/api/chat")),
    (TEXT, {"suffix": "end"}, ("`suffix`", "no tokens for filling a gap")),
    (TEXT, {"truncate": True}, ("`truncate` is not supported",)),
    (TEXT, {"width": 512}, ("`width` is not supported",)),
    (TEXT, {"raw": True, "system": "x"}, ("`raw` and `system` exclude",)),
    (TEXT, {"raw": True, "think": True}, ("`raw` and `think` exclude",)),
    (CHAT, {"format": {"items": {"uniqueItems": True}}},
     ("`format.items.uniqueItems`", "cannot be enforced")),
    (TEXT, {"raw": True, "format": {"uniqueItems": True}}, ("`format.uniqueItems`", "enforced")),
    (CHAT, {"think": True}, ("`think`", "cannot switch thinking on")),
    (CHAT, {"think": "high"}, ("`think` is high", "no degrees")),
    (CHAT, {"think": "deeply"}, ("`think`", "'medium'")),
    (CHAT, {"think": 5}, ("`think`", '"low"')),
    (CHAT, {"format": "yaml"}, ("`format`", "'json'")),
    (CHAT, {"format": 5}, ("`format`", "a JSON schema")),
    (CHAT, {"top_logprobs": 3}, ("`top_logprobs` needs `logprobs`",)),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, ("`top_logprobs`", "at most 20")),
    # tools
    (CHAT, {"tools": {}}, ("`tools`", "an array")),
    (CHAT, {"tools": [{"type": "function"}]}, ("`tools[0].function` is required",)),
    (CHAT, {"tools": [TOOL, TOOL]}, ("`tools[1].function.name` is f",)),
    (CHAT, {"tools": [TOOL]}, ("`tools`", "chat template")),
    (TEXT, {"tools": [TOOL]}, ("`tools`", "not a parameter")),
    # length
    (TEXT, {"prompt": "word " * 400}, ("maximum context length",)),
    (TEXT, {"prompt": "word " * 400, "raw": True}, (f"context length is {CONTEXT} tokens",)),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": {}}}] * 128}] * 129}, ("more than 16384",)),
    (TEXT, {"prompt": "w" * 100_000, "raw": True}, ("100000 characters",)),
    # vectors
    (EMBED, {"model": REMOVED}, ("`model` is required",)),
    (EMBED, {"input": 7}, ("`input`", "a string or an array of strings", "not 7")),
    (EMBED, {"input": ["a", 7]}, ("`input[1]`", "a string")),
    (EMBED, {"input": ["a", ""]}, ("`input[1]`", "at least 1")),
    (EMBED, {"input": [[1, 2]]}, ("`input[0]`", "a string")),
    (EMBED, {"input": ["a"] * 2049}, ("`input` has 2049", "at most 2048")),
    (EMBED, {"truncate": "yes"}, ("`truncate`", "true or false")),
    (EMBED, {"input": ["a", "word " * 400], "truncate": False},
     ("`input[1]` has", f"maximum context length is {CONTEXT} tokens", "set `truncate`")),
    (EMBED, {"input": "fox dog", "truncate": False} | options(num_ctx=1),
     ("`input` has", "context length is 1 tokens")),
    (EMBED, {"dimensions": HIDDEN + 1}, (f"`dimensions` is {HIDDEN + 1}", f"have {HIDDEN}")),
    (EMBED, {"dimensions": -1}, ("`dimensions`", "at least 0")),
    (EMBED, {"dimensions": "8"}, ("`dimensions`", "an integer")),
    (EMBED, {"prompt": "x"}, ("`prompt`", "not a parameter")),
    (EMBED, {"input": "", "keep_alive": 0}, ("`keep_alive` is 0", "unload")),
    (EMBED, options(num_ctx=CONTEXT + 1), (f"`options.num_ctx` is {CONTEXT + 1}",)),
    (OLDER, {"prompt": ["a"]}, ("`prompt`", "a string")),
    (OLDER, {"prompt": "word " * 400},
     ("`prompt` has", "maximum context length", "`truncate` of `/api/embed`")),
    (OLDER, {"prompt": "w" * 100_000}, ("100000 characters",)),
    (OLDER, {"input": "x"}, ("`input`", "not a parameter")),
    # unknown fields
    (CHAT, {"prompt": "x"}, ("`prompt`", "not a parameter")),
    (TEXT, {"messages": []}, ("`messages`", "not a parameter")),
    (CHAT, {"temperature": 1}, ("`temperature`", "not a parameter")),
    (SHOW, {"system": "x"}, ("`system`", "not a parameter")),
]  # fmt: skip


def check(answer: httpx.Response, status: int, words: tuple[str, ...]) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    for word in words:
        assert word in answer.json()["error"], answer.text
    assert len(answer.json()["error"]) < 600


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0][5:]}-{repr(row[1])[:60]}")
def test_a_wrong_field_is_refused_by_name(
    fake: FakeServer, http: httpx.Client, row: tuple[str, dict[str, Any], tuple[str, ...]]
):
    route, change, words = row
    body = {name: value for name, value in (BASE[route] | change).items() if value is not REMOVED}
    submitted = len(fake.engine.requests)
    check(http.post(route, content=json.dumps(body)), 400, words)
    assert len(fake.engine.requests) == submitted, "a refused request reached the engine"


@pytest.mark.parametrize("route", BASE)
def test_bodies_that_are_not_json_objects_are_refused(http: httpx.Client, route: str):
    for content, words in ((b"", "empty"), (b"{", "line 1"), (b"[]", "array"), (b"\xff", "UTF-8")):
        check(http.post(route, content=content), 400, (words,))


@pytest.mark.parametrize("route", BASE)
@pytest.mark.parametrize("model", ["llama3", "fake:7b", ":latest", "x" * 10_000])
def test_an_unknown_model_is_not_found(http: httpx.Client, route: str, model: str):
    answer = http.post(route, json=BASE[route] | {"model": model})
    check(answer, 404, ("does not exist here", "`fake`"))


def test_missing_routes_are_404_in_ollamas_form(http: httpx.Client):
    check(http.post("/api/pull", json={"model": "x"}), 404, ("/api/pull",))
    check(http.get(CHAT), 405, ("GET",))


@pytest.mark.parametrize(
    ("route", "change"),
    [
        (TEXT, {"suffix": "", "system": "", "template": "", "context": [], "images": []}),
        (TEXT, {"options": None, "format": "", "think": False, "keep_alive": -1}),
        (TEXT, {"keep_alive": "1h30m", "truncate": False, "shift": False}),
        (CHAT, {"tools": [], "format": None, "keep_alive": 0}),
        (CHAT, options(mirostat=0, repeat_last_n=-1, penalize_newline=True, num_keep=4)),
        (CHAT, message(images=[], tool_calls=[], thinking="")),
        (EMBED, {"truncate": True, "dimensions": 0, "keep_alive": "5m"} | options(num_ctx=8)),
        (EMBED, options(temperature=None, mirostat=None, num_gpu=1)),
        (OLDER, {"prompt": None, "keep_alive": 60}),
        (SHOW, {"verbose": True, "model": None, "name": "fake"}),
    ],
)
def test_what_asks_for_nothing_unusual_is_taken(
    http: httpx.Client, route: str, change: dict[str, Any]
):
    answer = http.post(route, json=BASE[route] | change)
    assert answer.status_code == 200, answer.text
