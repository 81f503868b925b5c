"""`stop_reason` in the choices of both routes: what of the caller's ended an answer."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer

USER = {"role": "user", "content": "Hello"}
END, COMMA = "<|end|>", ","
# What a request asks for -> how its answer, the greeting and the model's end token, ended.
CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "stop", None),
    ({"max_tokens": 3}, "length", None),
    ({"stop": ["never", "rld"]}, "stop", "rld"),
    ({"stop": "rld", "include_stop_str_in_output": True}, "stop", "rld"),
    ({"stop_token_ids": [COMMA]}, "stop", COMMA),
    ({"stop_token_ids": [END]}, "stop", None),
    ({"stop_token_ids": [END], "ignore_eos": True}, "stop", END),
    ({"stop_token_ids": [COMMA], "stop": "H"}, "stop", "H"),
]


def token_id(fake: FakeServer, word: str) -> int:
    body = {"prompt": word, "add_special_tokens": False}
    [token] = httpx.post(f"{fake.url}/tokenize", json=body).json()["tokens"]
    return token


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(("asked", "finish", "reason"), CASES)
def test_the_callers_stop_is_reported_and_the_models_own_end_is_null(
    fake: FakeServer, route: str, asked: dict[str, Any], finish: str, reason: str | None
):
    ids = {word: token_id(fake, word) for word in (END, COMMA)}
    if "stop_token_ids" in asked:
        asked = asked | {"stop_token_ids": [ids[word] for word in asked["stop_token_ids"]]}
        reason = ids.get(reason or "", reason)  # type: ignore[assignment]
    body = {"model": "fake", "max_tokens": 50} | asked
    body |= {"prompt": "x"} if route == "completions" else {"messages": [USER]}
    path = "/v1/completions" if route == "completions" else "/v1/chat/completions"
    [choice] = httpx.post(fake.url + path, json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)
    events = httpx.post(fake.url + path, json=body | {"stream": True}).text.split("\n\n")
    *chunks, last, done, empty = events
    assert (done, empty) == ("data: [DONE]", "")
    last_choice = httpx.Response(200, content=last.removeprefix("data: ")).json()["choices"][0]
    assert (last_choice["finish_reason"], last_choice["stop_reason"]) == (finish, reason)
    assert not any("stop_reason" in chunk for chunk in chunks)


def test_an_echo_alone_has_no_stop_reason(fake: FakeServer):
    hello = httpx.post(f"{fake.url}/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    body = {"model": "fake", "prompt": "x", "echo": True, "max_tokens": 0, "stop_token_ids": hello}
    [choice] = httpx.post(f"{fake.url}/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
