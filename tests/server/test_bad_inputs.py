"""What each wrong input is told: status, code, param and the words that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from fake_engine import CONTEXT, VOCAB, FakeServer, fake_server
from hypothesis import given, settings
from hypothesis import strategies as st

from server.schema.chat import CHAT_UNSUPPORTED, ChatRequest, Message
from server.schema.completions import CompletionRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"model": "fake", "prompt": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
}
REMOVED = object()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_server(tmp_path_factory.mktemp("tokenizer")) as server:
        yield server


@pytest.fixture(scope="module")
def http(fake: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake.url) as client:
        yield client


def messages(*contents: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for content in contents]}


def part(kind: str, **fields: object) -> dict[str, Any]:
    return messages([{"type": "text", "text": "see"}, {"type": kind, **fields}])


MISSING = "missing_required_parameter"
TYPE = "invalid_type"
VALUE = "invalid_value"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
M0 = "messages[0]"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


# route, what is changed in a good body, code, param, words of the message; the status is 400
FIELDS: list[tuple[str, dict[str, Any], str, str | None, str]] = [
    # required fields and their types
    (CHAT, {"model": REMOVED}, MISSING, "model", "required"),
    (CHAT, {"messages": REMOVED}, MISSING, "messages", "required"),
    (TEXT, {"prompt": REMOVED}, MISSING, "prompt", "required"),
    (CHAT, {"model": 7}, TYPE, "model", "a string, not 7"),
    (CHAT, {"model": None}, TYPE, "model", "not null"),
    (CHAT, {"messages": None}, TYPE, "messages", "an array"),
    (CHAT, {"messages": "Hello"}, TYPE, "messages", "an array"),
    (CHAT, {"messages": {}}, TYPE, "messages", "an array"),
    (CHAT, {"messages": []}, VALUE, "messages", "at least 1"),
    (CHAT, {"messages": ["Hello"]}, TYPE, M0, "an object"),
    (CHAT, {"messages": [None]}, TYPE, M0, "an object"),
    (CHAT, {"messages": [{}]}, MISSING, f"{M0}.role", "required"),
    (CHAT, {"messages": [{"role": "user"}]}, MISSING, f"{M0}.content", "role user"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, VALUE, f"{M0}.role", "'assistant'"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, VALUE, f"{M0}.role", "'user'"),
    (CHAT, messages(5), TYPE, f"{M0}.content", "a string or an array"),
    (CHAT, messages({"text": "x"}), TYPE, f"{M0}.content", "a string or an array"),
    (CHAT, messages([]), VALUE, f"{M0}.content", "at least 1"),
    (CHAT, messages(["x"]), TYPE, f"{M0}.content[0]", "an object"),
    (CHAT, messages([{"type": "text"}]), MISSING, f"{M0}.content[0].text", "required"),
    (CHAT, messages([{"text": "x"}]), MISSING, f"{M0}.content[0].type", "required"),
    (CHAT, messages([{"type": 3, "text": "x"}]), VALUE, f"{M0}.content[0].type", "'text'"),
    (CHAT, messages([{"type": "text", "text": 1}]), TYPE, f"{M0}.content[0].text", "a string"),
    (CHAT, part("image_url", image_url={"url": "http://127.0.0.1/"}), UNSUPPORTED,
     f"{M0}.content[1].type", "text only"),
    (CHAT, part("input_audio", input_audio={}), UNSUPPORTED, f"{M0}.content[1].type", "audio"),
    (CHAT, part("file", file={}), UNSUPPORTED, f"{M0}.content[1].type", "text only"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": "glad"}]}, UNKNOWN,
     f"{M0}.mood", "not a parameter"),
    (CHAT, {"messages": [{"role": "assistant"}]}, MISSING, f"{M0}.content", "neither"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": ""}]}, VALUE,
     f"{M0}.name", "at least 1"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, MISSING,
     f"{M0}.tool_call_id", "role tool"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, VALUE,
     f"{M0}.role", "chat template"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, VALUE,
     f"{M0}.tool_call_id", "role tool"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, VALUE,
     f"{M0}.tool_calls", "chat template"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]}, VALUE,
     f"{M0}.tool_calls", "at least 1"),
    # numbers: range, type, no conversion
    (CHAT, {"temperature": -0.1}, VALUE, "temperature", "at least 0"),
    (CHAT, {"temperature": 2.01}, VALUE, "temperature", "at most 2"),
    (CHAT, {"temperature": "1"}, TYPE, "temperature", "a number"),
    (CHAT, {"temperature": True}, TYPE, "temperature", "not true"),
    (CHAT, {"temperature": [1]}, TYPE, "temperature", "not an array"),
    (TEXT, {"temperature": {}}, TYPE, "temperature", "not an object"),
    (CHAT, {"top_p": 0}, VALUE, "top_p", "greater than 0"),
    (CHAT, {"top_p": 1.1}, VALUE, "top_p", "at most 1"),
    (TEXT, {"top_p": -1}, VALUE, "top_p", "greater than 0"),
    (CHAT, {"top_k": -2}, VALUE, "top_k", "at least -1"),
    (CHAT, {"top_k": 1.5}, TYPE, "top_k", "an integer"),
    (CHAT, {"min_p": 1.5}, VALUE, "min_p", "at most 1"),
    (CHAT, {"min_p": -0.5}, VALUE, "min_p", "at least 0"),
    (CHAT, {"n": 0}, VALUE, "n", "at least 1"),
    (CHAT, {"n": 129}, VALUE, "n", "at most 128"),
    (CHAT, {"n": 1_000_000}, VALUE, "n", "at most 128"),
    (CHAT, {"n": "2"}, TYPE, "n", "an integer"),
    (CHAT, {"n": True}, TYPE, "n", "an integer"),
    (TEXT, {"prompt": ["a", "b"], "n": 128}, VALUE, "n", "256 sequences"),
    (CHAT, {"seed": 2**63}, VALUE, "seed", "less than"),
    (CHAT, {"seed": 10**30}, TYPE, "seed", "an integer"),
    (CHAT, {"seed": 0.5}, TYPE, "seed", "an integer"),
    (CHAT, {"presence_penalty": 2.5}, VALUE, "presence_penalty", "at most 2"),
    (CHAT, {"presence_penalty": "high"}, TYPE, "presence_penalty", "a number"),
    (CHAT, {"frequency_penalty": -2.5}, VALUE, "frequency_penalty", "at least -2"),
    (CHAT, {"repetition_penalty": 0}, VALUE, "repetition_penalty", "at least 0.01"),
    (CHAT, {"repetition_penalty": 1e-38}, VALUE, "repetition_penalty", "at least 0.01"),
    (CHAT, {"top_k": 2**31}, VALUE, "top_k", "less than 2147483648"),
    (CHAT, {"repetition_penalty": 2.1}, VALUE, "repetition_penalty", "at most 2"),
    (CHAT, {"max_tokens": 0}, VALUE, "max_tokens", "at least 1"),
    (CHAT, {"max_tokens": -1}, VALUE, "max_tokens", "at least 1"),
    (CHAT, {"max_tokens": "5"}, TYPE, "max_tokens", 'not "5"'),
    (CHAT, {"max_tokens": 5.5}, TYPE, "max_tokens", "an integer"),
    (CHAT, {"max_completion_tokens": 0}, VALUE, "max_completion_tokens", "at least 1"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, VALUE, "max_completion_tokens", "one of"),
    (TEXT, {"max_tokens": 0}, VALUE, "max_tokens", "`echo`"),
    (TEXT, {"max_tokens": -1}, VALUE, "max_tokens", "at least 0"),
    (CHAT, {"min_tokens": -1}, VALUE, "min_tokens", "at least 0"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, VALUE, "min_tokens", "here 8"),
    (CHAT, {"priority": 2**40}, VALUE, "priority", "less than"),
    (CHAT, {"cache_salt": ""}, VALUE, "cache_salt", "at least 1"),
    (CHAT, {"cache_salt": "x" * 129}, VALUE, "cache_salt", "at most 128"),
    # stop, bias, logprobs
    (CHAT, {"stop": ""}, VALUE, "stop", "at least 1"),
    (CHAT, {"stop": ["a", ""]}, VALUE, "stop[1]", "at least 1"),
    (CHAT, {"stop": ["a"] * 5}, VALUE, "stop", "at most 4"),
    (CHAT, {"stop": 5}, TYPE, "stop", "a string or an array"),
    (CHAT, {"stop": [5]}, TYPE, "stop[0]", "a string"),
    (CHAT, {"stop": "x" * 1025}, VALUE, "stop", "at most 1024"),
    (CHAT, {"stop_token_ids": [VOCAB]}, VALUE, "stop_token_ids", f"0 to {VOCAB - 1}"),
    (CHAT, {"stop_token_ids": [-1]}, VALUE, "stop_token_ids", "-1"),
    (CHAT, {"stop_token_ids": ["1"]}, TYPE, "stop_token_ids[0]", "an integer"),
    (CHAT, {"stop_token_ids": 1}, TYPE, "stop_token_ids", "an array"),
    (CHAT, {"logit_bias": {str(VOCAB): 1}}, VALUE, "logit_bias", f"0 to {VOCAB - 1}"),
    (CHAT, {"logit_bias": {"-1": 1}}, VALUE, "logit_bias", "not a token id"),
    (CHAT, {"logit_bias": {"Hello": 1}}, VALUE, "logit_bias", "not a token id"),
    (CHAT, {"logit_bias": {"1": 101}}, VALUE, "logit_bias", "between -100 and 100"),
    (CHAT, {"logit_bias": {"1": "5"}}, TYPE, "logit_bias.1", "a number"),
    (CHAT, {"logit_bias": [1]}, TYPE, "logit_bias", "an object"),
    (CHAT, {"logit_bias": {str(key): 1 for key in range(1025)}}, VALUE, "logit_bias", "1024"),
    (CHAT, {"logprobs": 1}, TYPE, "logprobs", "true or false"),
    (CHAT, {"top_logprobs": 2}, VALUE, "top_logprobs", "`logprobs`"),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, VALUE, "top_logprobs", "`logprobs`"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, VALUE, "top_logprobs", "at most 20"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, VALUE, "top_logprobs", "at least 0"),
    (TEXT, {"logprobs": True}, TYPE, "logprobs", "an integer"),
    (TEXT, {"logprobs": 6}, VALUE, "logprobs", "at most 5"),
    (TEXT, {"logprobs": -1}, VALUE, "logprobs", "at least 0"),
    (CHAT, {"prompt_logprobs": 1_000_000}, VALUE, "prompt_logprobs", "at most 20"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, VALUE, "prompt_logprobs", "streamed"),
    # flags and streams
    (CHAT, {"stream": "yes"}, TYPE, "stream", "true or false"),
    (CHAT, {"stream": 1}, TYPE, "stream", "true or false"),
    (CHAT, {"stream_options": {"include_usage": True}}, VALUE, "stream_options", "`stream`"),
    (CHAT, {"stream": True, "stream_options": 1}, TYPE, "stream_options", "an object"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, UNKNOWN, "stream_options.x", "not a"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": "y"}}, TYPE,
     "stream_options.include_usage", "true or false"),
    (CHAT, {"ignore_eos": "no"}, TYPE, "ignore_eos", "true or false"),
    (TEXT, {"echo": "no"}, TYPE, "echo", "true or false"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, VALUE,
     "continue_final_message", "exclude"),
    (CHAT, {"chat_template_kwargs": {"messages": "x"}}, VALUE,
     "chat_template_kwargs.messages", "set by the server"),
    (CHAT, {"chat_template_kwargs": {"x": [1]}}, TYPE, "chat_template_kwargs.x", "true, false"),
    (CHAT, {"user": 5}, TYPE, "user", "a string"),
    (CHAT, {"metadata": {"a": 1}}, TYPE, "metadata.a", "a string"),
    (CHAT, {"metadata": {"a": "x" * 513}}, VALUE, "metadata.a", "at most 512"),
    (CHAT, {"metadata": {"a" * 65: "x"}}, VALUE, "metadata." + "a" * 64, "at most 64"),
    (CHAT, {"metadata": {str(key): "x" for key in range(17)}}, VALUE, "metadata", "at most 16"),
    (CHAT, {str(key): 1 for key in range(200)}, VALUE, None, "the body has 202 entries"),
    (CHAT, {"messages": [{str(key): 1 for key in range(200)}]}, VALUE, M0, "200 entries"),
    (CHAT, {"x" * 10_000: 1}, UNKNOWN, "x" * 64, "not a parameter"),
    # prompts
    (TEXT, {"prompt": 5}, TYPE, "prompt", "token ids"),
    (TEXT, {"prompt": None}, TYPE, "prompt", "token ids"),
    (TEXT, {"prompt": {}}, TYPE, "prompt", "token ids"),
    (TEXT, {"prompt": ""}, VALUE, "prompt", "no tokens"),
    (TEXT, {"prompt": []}, VALUE, "prompt", "at least 1"),
    (TEXT, {"prompt": ["a", ""]}, VALUE, "prompt", "no tokens"),
    (TEXT, {"prompt": [[]]}, VALUE, "prompt[0]", "at least 1"),
    (TEXT, {"prompt": [1, "a"]}, TYPE, "prompt[1]", "an integer"),
    (TEXT, {"prompt": ["a", 1]}, TYPE, "prompt[1]", "a string"),
    (TEXT, {"prompt": [1.5]}, TYPE, "prompt[0]", "an integer"),
    (TEXT, {"prompt": [True]}, TYPE, "prompt[0]", "an integer"),
    (TEXT, {"prompt": [VOCAB]}, VALUE, "prompt", f"0 to {VOCAB - 1}"),
    (TEXT, {"prompt": [[1], [-1]]}, VALUE, "prompt", "-1"),
    (TEXT, {"prompt": ["a"] * 1025}, VALUE, "prompt", "at most 1024"),
    # length
    (TEXT, {"prompt": [1] * CONTEXT}, TOO_LONG, "prompt", f"maximum context length {CONTEXT}"),
    (TEXT, {"prompt": [1] * 250, "max_tokens": 7}, TOO_LONG, "prompt", "250 tokens"),
    (TEXT, {"max_tokens": CONTEXT}, TOO_LONG, "prompt", "lower `max_tokens`"),
    (TEXT, {"max_tokens": 10**12}, TOO_LONG, "prompt", "maximum context length"),
    (CHAT, messages("word " * 400), TOO_LONG, "messages", "maximum context length"),
    (CHAT, messages("w" * 100_000), TOO_LONG, "messages", "100000 characters"),
    (CHAT, {"max_tokens": CONTEXT}, TOO_LONG, "messages", f"{CONTEXT}"),
    # what this server does not have, by name
    (CHAT, {"tools": [{"type": "function"}]}, MISSING, "tools[0].function", "required"),
    (CHAT, {"tools": [tool("f")]}, UNSUPPORTED, "tools", "no place for tools"),
    (CHAT, {"tools": []}, VALUE, "tools", "at least 1"),
    (CHAT, {"tools": [tool(f"f{n}") for n in range(129)]}, VALUE, "tools", "at most 128"),
    (CHAT, {"tools": [tool("f"), tool("f")]}, VALUE, "tools[1].function.name", "earlier tool"),
    (CHAT, {"tools": [tool("a b")]}, VALUE, "tools[0].function.name", "pattern"),
    (CHAT, {"tools": [tool("f", parameters={"type": "array"})]}, VALUE,
     "tools[0].function.parameters", "of type object"),
    (CHAT, {"tools": [tool("f", parameters=[])]}, TYPE, "tools[0].function.parameters", "object"),
    (CHAT, {"tools": [tool("f", strict=1)]}, TYPE, "tools[0].function.strict", "true or false"),
    (CHAT, {"tools": [tool("f") | {"type": "custom"}]}, VALUE, "tools[0].type", "'function'"),
    (CHAT, {"tool_choice": "auto"}, VALUE, "tool_choice", "needs `tools`"),
    (CHAT, {"tool_choice": "any"}, VALUE, "tool_choice", "'required'"),
    (CHAT, {"tool_choice": 1}, TYPE, "tool_choice", "required"),
    (CHAT, {"tools": [tool("f")], "tool_choice": tool("g")}, VALUE, "tool_choice.function.name",
     "not among `tools`"),
    (CHAT, {"parallel_tool_calls": True}, VALUE, "parallel_tool_calls", "needs `tools`"),
    (CHAT, {"functions": [{"name": "f"}]}, UNSUPPORTED, "functions", "`tools`"),
    (CHAT, {"functions": [{}]}, UNSUPPORTED, "functions", "not supported"),
    (CHAT, {"response_format": {"type": "xml"}}, VALUE, "response_format.type", "'json_schema'"),
    (CHAT, {"modalities": ["text", "audio"]}, UNSUPPORTED, "modalities", "text"),
    (CHAT, {"audio": {"voice": "x"}}, UNSUPPORTED, "audio", "not supported"),
    (CHAT, {"prediction": {"type": "content"}}, MISSING, "prediction.content", "required"),
    (CHAT, {"web_search_options": {}}, UNSUPPORTED, "web_search_options", "not supported"),
    (CHAT, {"reasoning_effort": "high"}, UNSUPPORTED, "reasoning_effort", "no place"),
    (CHAT, {"store": True}, UNSUPPORTED, "store", "false"),
    (CHAT, {"service_tier": "priority"}, UNSUPPORTED, "service_tier", "default"),
    (CHAT, {"chat_template": "{{ 1 }}"}, UNSUPPORTED, "chat_template", "own template"),
    (CHAT, {"echo": True}, UNSUPPORTED, "echo", TEXT),
    (CHAT, {"guided_json": {}}, UNSUPPORTED, "guided_json", "not supported"),
    (CHAT, {"truncate_prompt_tokens": 0}, VALUE, "truncate_prompt_tokens", "at least 1"),
    (TEXT, {"suffix": "end"}, UNSUPPORTED, "suffix", "gap"),
    (CHAT, {"best_of": 2}, UNSUPPORTED, "best_of", "`n`"),
    (TEXT, {"best_of": True}, TYPE, "best_of", "an integer"),
    # what nobody has
    (CHAT, {"temprature": 1}, UNKNOWN, "temprature", "did you mean `temperature`"),
    (CHAT, {"prompt": "Hello"}, UNKNOWN, "prompt", "not a parameter"),
    (TEXT, {"messages": []}, UNKNOWN, "messages", "not a parameter"),
    (TEXT, {"": 1}, UNKNOWN, "", "not a parameter"),
    (CHAT, {"model_config": 1}, UNKNOWN, "model_config", "not a parameter"),
    # tokenize, detokenize
    ("/tokenize", {"prompt": REMOVED}, MISSING, "prompt", "either"),
    ("/tokenize", messages("x"), VALUE, "prompt", "either"),
    ("/tokenize", {"prompt": 1}, TYPE, "prompt", "a string"),
    ("/tokenize", {"text": "x"}, UNKNOWN, "text", "not a parameter"),
    ("/detokenize", {"tokens": REMOVED}, MISSING, "tokens", "required"),
    ("/detokenize", {"tokens": "1"}, TYPE, "tokens", "an array"),
    ("/detokenize", {"tokens": [VOCAB]}, VALUE, "tokens", "not a token id"),
    ("/detokenize", {"tokens": [1, None]}, TYPE, "tokens[1]", "an integer"),
]  # fmt: skip


def name(row: tuple[Any, ...]) -> str:
    route, change, code, *_ = row
    return f"{route.rsplit('/', 1)[-1]}-{repr(change)[:40]}-{code}"


def check(answer: httpx.Response, status: int, code: str, param: str | None, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["type"] == "invalid_request_error"
    assert words in error["message"], error
    assert len(error["message"]) < 600


@pytest.mark.parametrize("row", FIELDS, ids=name)
def test_a_wrong_field_is_refused_by_name(
    fake: FakeServer, http: httpx.Client, row: tuple[Any, ...]
):
    route, change, code, param, words = row
    body = {k: v for k, v in (BASE[route] | change).items() if v is not REMOVED}
    submitted = len(fake.engine.requests)
    answer = http.post(route, content=json.dumps(body), headers=JSON)
    check(answer, 400, code, param, words)
    assert len(fake.engine.requests) == submitted, "a refused request reached the engine"


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
    ("application/json", b"[" + b"[]," * 1_000_000 + b"[]]", 400, "invalid_json", "opening"),
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
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
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
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, messages([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    (CHAT, messages("x", role="developer")),
    (CHAT, messages("\N{PILE OF POO}\u200d\u0000\u202e")),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "Ann"}]}),
    (TEXT, {"prompt": [[1], [2, 3]], "best_of": 1}),
    (TEXT, {"prompt": [1] * 250, "max_tokens": 6}),
    (TEXT, {"suffix": None, "echo": True, "max_tokens": 0}),
    ("/tokenize", {"prompt": ""}),
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


@settings(deadline=None, max_examples=400)
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


@settings(deadline=None, max_examples=200)
@given(place=st.integers(0, len(GOOD)), junk=st.binary(max_size=3), cut=st.integers(0, 3))
def test_no_bytes_make_the_server_fail(http: httpx.Client, place: int, junk: bytes, cut: int):
    body = GOOD[:place] + junk + GOOD[place + cut :]
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code in (200, 400, 404), answer.text
