"""Long work for a large request is done off the event loop, on which all streams wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from server.apis.ollama.request import to_chat_request
from server.apis.ollama.schema import OllamaChatBody
from server.apis.responses.tools_schema import ResponsesFunctionTool
from server.batches.store import BatchStore
from server.prompt.template_messages import template_tools
from tests.support.server.fake_engine import FakeServer, fake_server

TURNS = [{"role": role, "content": "Hello"} for role in ("user", "assistant")] * 500
TURNS += [{"role": "user", "content": "Hello"}]
TEXT = "Hello world " * 10_000
IDS = [1] * 20_000
SCORED = {"messages": TURNS[:1], "stream": False, "logprobs": True, "top_logprobs": 20}
ECHOED = {"prompt": TEXT, "n": 20, "max_tokens": 1}
FORM = {"response_format": {"type": "json_object"}}
TEXT_ANSWER = "server.apis.openai.completions.TextAnswer"
# route, body, the function that takes long
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": TEXT}, "orjson.dumps"),
    ("/detokenize", {"tokens": IDS}, "server.apis.openai.tokenize.check_token_ids"),
    ("/v1/completions", {"prompt": IDS}, "server.generation.text_request.check_token_ids"),
    (
        "/v1/completions",
        {"prompt": "Hello"} | FORM,
        "server.constrained.request_grammar.format_grammar",
    ),
    ("/v1/completions", ECHOED | {"echo": True}, f"{TEXT_ANSWER}._best"),
    ("/v1/completions", ECHOED | {"return_token_ids": True}, f"{TEXT_ANSWER}._best"),
    (
        "/v1/messages",
        {"messages": TURNS, "max_tokens": 1},
        "server.apis.anthropic.routes.to_chat_request",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": TURNS},
        "server.apis.anthropic.routes.to_chat_request",
    ),
    ("/api/chat", {"messages": TURNS}, "server.apis.ollama.routes.to_chat_request"),
    ("/api/chat", SCORED, "server.apis.ollama.answer.chat_logprobs"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    store = BatchStore(folder / "data", max_bytes=1 << 20)
    with fake_server(folder, context=1 << 16, batches=store) as server:
        yield server
    store.close()


def watched(monkeypatch: pytest.MonkeyPatch, place: str) -> list[bool]:
    """Of each call of a function from now on: whether it is on an event loop."""
    owner, _, name = place.rpartition(".")
    real = getattr(resolve_name(owner), name)
    calls: list[bool] = []

    def watch(*args: Any, **options: Any) -> Any:
        calls.append(asyncio._get_running_loop() is not None)
        return real(*args, **options)

    monkeypatch.setattr(resolve_name(owner), name, watch)
    return calls


@pytest.mark.parametrize(("route", "body", "place"), ROWS, ids=[f"{r[0]} {r[2]}" for r in ROWS])
def test_a_large_request_is_worked_on_elsewhere(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], place: str
):
    fake.say("Hello world " * 300)
    calls = watched(monkeypatch, place)
    httpx.post(f"{fake.url}{route}", json={"model": "fake"} | body, timeout=60)
    assert calls and not any(calls), calls


def test_a_long_list_of_files_is_written_elsewhere(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    calls = watched(monkeypatch, "msgspec.json.encode")
    answer = httpx.get(f"{fake.url}/v1/files")
    nothing = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert answer.json() == nothing
    assert calls == [False]


def test_figures_are_written_elsewhere(fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    calls = watched(monkeypatch, "server.metrics.metrics.generate_latest")
    assert httpx.get(f"{fake.url}/metrics").status_code == 200
    assert calls == [False]


def test_the_schemas_of_tools_are_not_copied():
    """They may have a million values, and where they are handed on is on the event loop."""
    inner = {"a": {"type": "string"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": inner}}
    parsed = OllamaChatBody.model_validate(
        {"model": "m", "messages": TURNS[:1], "tools": [{"type": "function", "function": function}]}
    )
    tokenizer = SimpleNamespace(template=None)
    chat = to_chat_request(parsed, tokenizer)  # type: ignore[arg-type]
    [to_json] = template_tools(chat.offered_tools(), tokenizer)  # type: ignore[arg-type]
    assert to_json == {"type": "function", "function": function}
    assert to_json["function"]["parameters"]["properties"] is inner
    tool = ResponsesFunctionTool.model_validate({"type": "function", **function})
    assert tool.as_chat() == to_json
    assert tool.as_chat()["function"]["parameters"]["properties"] is inner
