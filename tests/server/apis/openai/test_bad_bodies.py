"""Bodies that are no JSON, models and routes that are not there, and what is right but unusual."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.apis.openai.chat_schema import CHAT_UNSUPPORTED, ChatRequest, Message
from server.apis.openai.completions_schema import CompletionRequest
from tests.support.examples import examples
from tests.support.server.malformed_requests import BASE, CHAT, JSON, TEXT, check, messages

GOOD = orjson.dumps(BASE[CHAT])

# content type, body, status, code, words
BODIES: list[tuple[str | None, bytes, int, str, str]] = [
    ("application/json", b"", 400, "invalid_json", "empty"),
    ("application/json", b"{", 400, "invalid_json", "line 1"),
    ("application/json", GOOD[:-1], 400, "invalid_json", "not valid JSON"),
    ("application/json", GOOD + b"}", 400, "invalid_json", "column"),
    ("application/json", b"hello", 400, "invalid_json", "column 1"),
    ("application/json", b"null", 400, "invalid_type", "JSON null"),
    ("application/json", b"[]", 400, "invalid_type", "JSON array"),
    ("application/json", b'"text"', 400, "invalid_type", "JSON string"),
    ("application/json", b"5", 400, "invalid_type", "JSON number"),
    ("application/json", b"{'model': 'fake'}", 400, "invalid_json", "not valid JSON"),
    ("application/json", b'{"temperature": NaN}', 400, "invalid_json", "finite"),
    ("application/json", b'{"temperature": Infinity}', 400, "invalid_json", "finite"),
    ("application/json", b'{"temperature": -Infinity}', 400, "invalid_json", "finite"),
    ("application/json", b'{"temperature": 1e999}', 400, "invalid_json", "infinity"),
    ("application/json", b'{"temperature": -1e999}', 400, "invalid_json", "infinity"),
    ("application/json", b'{"model": "\\ud800"}', 400, "invalid_json", "surrogate"),
    ("application/json", b'{"model": "\\udc00x"}', 400, "invalid_json", "surrogate"),
    ("application/json", b'{"model": "\xff\xfe"}', 400, "invalid_json", "UTF-8 at byte 11"),
    ("application/json", b'{"model": "\xed\xa0\x80"}', 400, "invalid_json", "UTF-8"),
    ("application/json", b'\xef\xbb\xbf{"model": "x"}', 400, "invalid_json", "not valid JSON"),
    ("application/json", '{"model": "x"}'.encode("utf-16"), 400, "invalid_json", "UTF-8"),
    ("application/json", b"[" * 65 + b"]" * 65, 400, "invalid_json", "64 levels"),
    ("application/json", b'{"a":' * 70 + b"1" + b"}" * 70, 400, "invalid_json", "64 levels"),
    ("application/json", b"[" * 100_000, 400, "invalid_json", "64 levels"),
    ("application/json", b'{"a":' * 100_000, 400, "invalid_json", "64 levels"),
    ("application/json", b'{"tools":' + b"[" * 64 + b"]" * 64 + b"}", 400, "invalid_json", "64"),
    ("application/json", b'{"model": "a\x00b"}', 400, "invalid_json", "control"),
    ("application/json", b"[" + b"[]," * 131_072 + b"[]]", 400, "invalid_json", "131072 are taken"),
    ("application/json", b"[" + b"1," * 1_200_001 + b"1]", 400, "invalid_json", "1200000 are"),
    ("text/plain", GOOD, 415, "unsupported_media_type", "text/plain"),
    ("application/x-www-form-urlencoded", b"model=fake", 415, "unsupported_media_type", "form"),
    ("multipart/form-data; boundary=x", b"--x--", 415, "unsupported_media_type", "multipart"),
    ("application/xml", b"<a/>", 415, "unsupported_media_type", "application/json"),
    (None, GOOD, 415, "unsupported_media_type", "not given"),
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, TEXT, "/tokenize"])
@pytest.mark.parametrize(
    "row", BODIES, ids=[f"{place}-{row[1][:20]!r}" for place, row in enumerate(BODIES)]
)
def test_a_body_that_is_not_json_is_refused(
    http: httpx.Client, route: str, row: tuple[str | None, bytes, int, str, str]
):
    kind, body, status, code, words = row
    headers = {} if kind is None else {"content-type": kind}
    check(http.post(route, content=body, headers=headers), status, code, None, words)


def test_a_compressed_body_is_refused(http: httpx.Client):
    headers = JSON | {"content-encoding": "gzip"}
    answer = http.post(CHAT, content=GOOD, headers=headers)
    check(answer, 415, "unsupported_media_type", None, "without compression")


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("model", ["gpt-4", "", "FAKE", "../fake", "x" * 10_000])
def test_an_unknown_model_is_404_and_names_those_there_are(
    http: httpx.Client, route: str, model: str
):
    answer = http.post(route, json=BASE[route] | {"model": model})
    check(answer, 404, "model_not_found", "model", "`fake`")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/chat", 404, "not_found"),
        ("GET", "/v2/models", 404, "not_found"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
    ],
)
def test_a_wrong_route_gets_the_same_kind_of_body(
    http: httpx.Client, method: str, path: str, status: int, code: str
):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "GET, POST"),
        ("/v1/responses/resp_x", "DELETE, GET"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/files", "GET, POST"),
        ("/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_gets_the_allowed_ones(http: httpx.Client, path: str, methods: str):
    answer = http.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    assert methods in answer.json()["error"]["message"]


MARK = {"mode": "explicit", "ttl": "12h"}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {key: None for key in ("temperature", "top_p", "n", "stop", "seed", "logit_bias")}),
    (CHAT, {"temperature": 0, "n": 3}),
    (CHAT, {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0}),
    (CHAT, {"top_k": 10**9}),
    (CHAT, {"seed": -(2**63)}),
    (CHAT, {"stop": ["a", "b", "c", "d"]}),
    (CHAT, {"logit_bias": {"0": -100, "1": 100.0}}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}),
    (CHAT, {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}}),
    (CHAT, {"store": False, "service_tier": "auto", "modalities": ["text"]}),
    (CHAT, {"cache_prompt": True, "repeat_penalty": 1.0, "stream_interval": 1}),
    (CHAT, {"separate_reasoning": True, "thinking_token_budget": -1, "return_prompt_text": False}),
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, messages([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    (CHAT, messages([{"type": "text", "text": "a", "prompt_cache_breakpoint": MARK}])),
    (CHAT, {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}),
    (CHAT, messages("x", role="developer")),
    (CHAT, messages("\N{PILE OF POO}\u200d\u0000\u202e")),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "Ann"}]}),
    (TEXT, {"prompt": [[1], [2, 3]], "best_of": 1}),
    (TEXT, {"prompt": [1] * 250, "max_tokens": 6}),
    (TEXT, {"suffix": None, "echo": True, "max_tokens": 0}),
    ("/tokenize", {"prompt": ""}),
    ("/tokenize", {"chat_template": None, "media_io_kwargs": None, "mm_processor_kwargs": None}),
    ("/detokenize", {"tokens": []}),
]


@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: repr(row[1])[:60])
def test_an_unusual_but_right_request_is_answered(
    http: httpx.Client, row: tuple[str, dict[str, Any]]
):
    route, change = row
    answer = http.post(route, content=orjson.dumps(BASE[route] | change), headers=JSON)
    assert answer.status_code == 200, answer.text


def test_of_a_repeated_key_the_last_value_counts(http: httpx.Client):
    body = b'{"model": 5, "prompt": "x", "model": "fake"}'
    answer = http.post(TEXT, content=body, headers=JSON)
    assert answer.status_code == 200


def test_a_json_content_type_may_name_its_charset(http: httpx.Client):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(CHAT, content=GOOD, headers=headers).status_code == 200


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["user", "text", "fake", "auto", "assistant", "tool", "image_url"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
names = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHAT_UNSUPPORTED})


@examples(400)
@given(
    route=st.sampled_from(list(BASE)),
    change=st.dictionaries(st.sampled_from(names), values, max_size=3),
    message=st.dictionaries(st.sampled_from(sorted(Message.model_fields)), values, max_size=4),
)
def test_no_json_makes_the_server_fail(
    http: httpx.Client, route: str, change: dict[str, Any], message: dict[str, Any]
):
    body = BASE[route] | change
    if message and "messages" in body:
        body = body | {"messages": [message]}
    answer = http.post(route, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@examples(200)
@given(place=st.integers(0, len(GOOD)), junk=st.binary(max_size=3), cut=st.integers(0, 3))
def test_no_bytes_make_the_server_fail(http: httpx.Client, place: int, junk: bytes, cut: int):
    body = GOOD[:place] + junk + GOOD[place + cut :]
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code in (200, 400, 404), answer.text
