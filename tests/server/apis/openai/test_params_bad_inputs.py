"""The error of each wrong value of a parameter, in addition to test_bad_inputs.py."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from runtime.messages import MAX_BANNED_TOKENS
from tests.support.server.fake_engine import CONTEXT, VOCAB, FakeServer
from tests.support.server.malformed_requests import (
    CHAT,
    M0,
    MISSING,
    REMOVED,
    TEXT,
    TOO_LONG,
    TYPE,
    UNKNOWN,
    UNSUPPORTED,
    VALUE,
    check,
    row_name,
    spoilt,
)  # fmt: skip

IDS = "allowed_token_ids"
BAD = "bad_words"
REPORTED = "logprob_token_ids"
CUT = "truncate_prompt_tokens"
OPTIONS = "stream_options"
KWARGS = "chat_template_kwargs"
TRUTH = "true or false"


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


def call(**fields: object) -> dict[str, Any]:
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | fields
    return {"messages": [{"role": "assistant", "tool_calls": [made]}]}


def streamed(**options: object) -> dict[str, Any]:
    return {"stream": True, "stream_options": options}


# route, what is changed in a good body, code, param, words of the message; the status is 400
ROWS: list[tuple[str, dict[str, Any], str, str | None, str]] = [
    # allowed_token_ids
    (TEXT, {IDS: []}, VALUE, IDS, "at least 1"),
    (CHAT, {IDS: []}, VALUE, IDS, "at least 1"),
    (TEXT, {IDS: list(range(1025))}, VALUE, IDS, "at most 1024"),
    (CHAT, {IDS: [VOCAB]}, VALUE, IDS, f"0 to {VOCAB - 1}"),
    (TEXT, {IDS: [3, -1]}, VALUE, IDS, "holds -1"),
    (TEXT, {IDS: 5}, TYPE, IDS, "an array"),
    (TEXT, {IDS: {"5": 1}}, TYPE, IDS, "an array"),
    (TEXT, {IDS: ["5"]}, TYPE, f"{IDS}[0]", "an integer"),
    (TEXT, {IDS: [5, 6.5]}, TYPE, f"{IDS}[1]", "an integer"),
    (CHAT, {IDS: [None]}, TYPE, f"{IDS}[0]", "not null"),
    (CHAT, {IDS: [True]}, TYPE, f"{IDS}[0]", "an integer"),
    (TEXT, {IDS: [2**70]}, TYPE, f"{IDS}[0]", "an integer"),
    (CHAT, {IDS: [0], "min_tokens": 1, "max_tokens": 2}, VALUE, IDS, "`min_tokens`"),
    (TEXT, {IDS: [7], "stop_token_ids": [7], "min_tokens": 1}, VALUE, IDS, "end the answer"),
    # bad_words
    (TEXT, {BAD: "fox"}, TYPE, BAD, "an array"),
    (TEXT, {BAD: [5]}, TYPE, f"{BAD}[0]", "a string"),
    (TEXT, {BAD: ["fox", None]}, TYPE, f"{BAD}[1]", "a string"),
    (CHAT, {BAD: [["fox"]]}, TYPE, f"{BAD}[0]", "a string"),
    (CHAT, {BAD: [""]}, VALUE, f"{BAD}[0]", "at least 1"),
    (TEXT, {BAD: ["x" * 129]}, VALUE, f"{BAD}[0]", "at most 128"),
    (TEXT, {BAD: ["x"] * 129}, VALUE, BAD, "at most 128"),
    (CHAT, {BAD: ["a", "\x01" * MAX_BANNED_TOKENS]}, VALUE, f"{BAD}[1]", "shorten"),
    (TEXT, {BAD: ["fox"], IDS: [-2]}, VALUE, IDS, "holds -2"),
    # truncate_prompt_tokens
    (TEXT, {CUT: 0}, VALUE, CUT, "-1"),
    (TEXT, {CUT: -2}, VALUE, CUT, "at least -1"),
    (CHAT, {CUT: -5}, VALUE, CUT, "at least -1"),
    (TEXT, {CUT: "5"}, TYPE, CUT, "an integer"),
    (TEXT, {"truncation_side": "left"}, VALUE, "truncation_side", CUT),
    (CHAT, {CUT: 5, "truncation_side": "middle"}, VALUE, "truncation_side", "'right'"),
    (CHAT, {"include_reasoning": "no"}, TYPE, "include_reasoning", "true or false"),
    (CHAT, {CUT: 1.5}, TYPE, CUT, "an integer"),
    (CHAT, {CUT: True}, TYPE, CUT, "an integer"),
    (TEXT, {CUT: CONTEXT, "prompt": [1] * 300}, TOO_LONG, "prompt", "maximum context length"),
    (TEXT, {CUT: 250, "prompt": [1] * 300, "max_tokens": 7}, TOO_LONG, "prompt", "250 tokens"),
    (TEXT, {CUT: 3, "prompt": ""}, VALUE, "prompt", "no tokens"),
    (TEXT, {CUT: 3, "prompt": [VOCAB] + [1] * 9}, VALUE, "prompt", "not a token id"),
    # return_token_ids, timings
    (TEXT, {"return_token_ids": 1}, TYPE, "return_token_ids", TRUTH),
    (TEXT, {"return_token_ids": "yes"}, TYPE, "return_token_ids", TRUTH),
    (TEXT, {"return_tokens_as_token_ids": True}, VALUE, "return_tokens_as_token_ids", "`logprobs`"),
    (CHAT, {"return_tokens_as_token_ids": True}, VALUE, "return_tokens_as_token_ids", "`logprobs`"),
    (CHAT, {"return_tokens_as_token_ids": 1}, TYPE, "return_tokens_as_token_ids", TRUTH),
    (CHAT, {"return_token_ids": []}, TYPE, "return_token_ids", TRUTH),
    (CHAT, {"timings": 1}, TYPE, "timings", TRUTH),
    (TEXT, {"timings": "all"}, TYPE, "timings", TRUTH),
    (TEXT, {"timings": {}}, TYPE, "timings", TRUTH),
    (TEXT, {"timing": True}, UNKNOWN, "timing", "did you mean `timings`"),
    # logprob_token_ids
    (TEXT, {REPORTED: [5]}, VALUE, REPORTED, "needs `logprobs`"),
    (CHAT, {REPORTED: [5]}, VALUE, REPORTED, "needs `logprobs`"),
    (CHAT, {REPORTED: [5], "logprobs": False}, VALUE, REPORTED, "needs `logprobs`"),
    (TEXT, {REPORTED: [5], "logprobs": 2}, VALUE, REPORTED, "asks for 2"),
    (CHAT, {REPORTED: [5], "logprobs": True, "top_logprobs": 1}, VALUE, REPORTED, "asks for 1"),
    (TEXT, {REPORTED: [], "logprobs": 0}, VALUE, REPORTED, "at least 1"),
    (TEXT, {REPORTED: list(range(129)), "logprobs": 0}, VALUE, REPORTED, "at most 128"),
    (CHAT, {REPORTED: [VOCAB], "logprobs": True}, VALUE, REPORTED, f"0 to {VOCAB - 1}"),
    (CHAT, {REPORTED: [-1], "logprobs": True}, VALUE, REPORTED, "holds -1"),
    (CHAT, {REPORTED: ["5"], "logprobs": True}, TYPE, f"{REPORTED}[0]", "an integer"),
    (CHAT, {REPORTED: {}, "logprobs": True}, TYPE, REPORTED, "an array"),
    # best_of
    (TEXT, {"best_of": 0}, VALUE, "best_of", "at least 1"),
    (TEXT, {"best_of": 21}, VALUE, "best_of", "at most 20"),
    (TEXT, {"best_of": "3"}, TYPE, "best_of", "an integer"),
    (TEXT, {"best_of": 2.5}, TYPE, "best_of", "an integer"),
    (TEXT, {"best_of": 2, "n": 3}, VALUE, "best_of", "at least `n`, here 3"),
    (TEXT, {"best_of": 1, "n": 2}, VALUE, "best_of", "at least `n`"),
    (TEXT, {"best_of": 2, "stream": True}, VALUE, "best_of", "cannot be streamed"),
    (TEXT, {"best_of": 20, "prompt": ["x"] * 11}, VALUE, "n", "220 sequences"),
    (CHAT, {"best_of": 3}, UNSUPPORTED, "best_of", "`n`"),
    # suffix
    (TEXT, {"suffix": 5}, TYPE, "suffix", "a string"),
    (TEXT, {"suffix": ["x"]}, TYPE, "suffix", "a string"),
    (TEXT, {"suffix": "x", "prompt": [1, 2]}, VALUE, "suffix", "text, not of token ids"),
    (TEXT, {"suffix": "x", "prompt": [[1], [2]]}, VALUE, "suffix", "text, not of token ids"),
    (TEXT, {"suffix": "x", "echo": True}, VALUE, "suffix", "exclude"),
    (TEXT, {"suffix": "x", CUT: 5}, VALUE, "suffix", "exclude"),
    (TEXT, {"suffix": "x", "prompt": ["a", "b"]}, UNSUPPORTED, "suffix", "`fake`"),
    (TEXT, {"suffix": "x" * 100_000}, TOO_LONG, "prompt", "maximum context length"),
    (CHAT, {"suffix": "x"}, UNKNOWN, "suffix", "not a parameter"),
    # prediction, reasoning_effort, verbosity
    (CHAT, {"prediction": "Hello"}, TYPE, "prediction", "an object"),
    (CHAT, {"prediction": []}, TYPE, "prediction", "an object"),
    (CHAT, {"prediction": {"content": "x"}}, MISSING, "prediction.type", "required"),
    (CHAT, {"prediction": {"type": "text", "content": "x"}}, VALUE, "prediction.type",
     "'content'"),
    (CHAT, {"prediction": {"type": "content", "content": 5}}, TYPE, "prediction.content",
     "a string or an array"),
    (CHAT, {"prediction": {"type": "content", "content": []}}, VALUE, "prediction.content",
     "at least 1"),
    (CHAT, {"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, VALUE,
     "prediction.content[0].type", "'text'"),
    (CHAT, {"prediction": {"type": "content", "content": "x", "n": 1}}, UNKNOWN,
     "prediction.n", "not a parameter"),
    (TEXT, {"prediction": {"type": "content", "content": "x"}}, UNKNOWN, "prediction", "not a"),
    (CHAT, {"reasoning_effort": "huge"}, VALUE, "reasoning_effort", "'minimal'"),
    (CHAT, {"reasoning_effort": 3}, VALUE, "reasoning_effort", "is 3"),
    (CHAT, {"reasoning_effort": ["low"]}, VALUE, "reasoning_effort", "'low'"),
    (CHAT, {"reasoning_effort": "max"}, UNSUPPORTED, "reasoning_effort", "use none or medium"),
    (CHAT, {"verbosity": "high"}, UNSUPPORTED, "verbosity", "use medium"),
    (CHAT, {"verbosity": "tiny"}, VALUE, "verbosity", "'low', 'medium' or 'high'"),
    (CHAT, {"verbosity": 1}, VALUE, "verbosity", "is 1"),
    (TEXT, {"reasoning_effort": "low"}, UNKNOWN, "reasoning_effort", "not a parameter"),
    (CHAT, {"reasoning_effort": "none", KWARGS: {"reasoning_effort": "low"}}, VALUE,
     "reasoning_effort", "leave one of them out"),
    # stream_options
    (CHAT, streamed(include_obfuscation=True), UNSUPPORTED, f"{OPTIONS}.include_obfuscation",
     "use false"),
    (TEXT, streamed(include_obfuscation=1), TYPE, f"{OPTIONS}.include_obfuscation", TRUTH),
    (CHAT, streamed(continuous_usage_stats=True), VALUE, f"{OPTIONS}.continuous_usage_stats",
     "`include_usage`"),
    (TEXT, streamed(continuous_usage_stats=True, include_usage=False), VALUE,
     f"{OPTIONS}.continuous_usage_stats", "`include_usage`"),
    (TEXT, streamed(continuous_usage_stats="x"), TYPE, f"{OPTIONS}.continuous_usage_stats", TRUTH),
    (TEXT, {OPTIONS: {"continuous_usage_stats": True}}, VALUE, OPTIONS, "`stream`"),
    (TEXT, {"stream": False, OPTIONS: {}}, VALUE, OPTIONS, "`stream`"),
    (TEXT, {"stream": True, OPTIONS: []}, TYPE, OPTIONS, "an object"),
    (TEXT, streamed(include_usages=True), UNKNOWN, f"{OPTIONS}.include_usages", "not a parameter"),
    # what both routes share, where only one was asked before
    (TEXT, {"model": REMOVED}, MISSING, "model", "required"),
    (TEXT, {"model": 5}, TYPE, "model", "a string"),
    (TEXT, {"temperature": 2.5}, VALUE, "temperature", "at most 2"),
    (TEXT, {"temperature": "hot"}, TYPE, "temperature", "a number"),
    (TEXT, {"top_p": -0.1}, VALUE, "top_p", "at least 0"),
    (TEXT, {"top_k": -7}, VALUE, "top_k", "at least -1"),
    (TEXT, {"top_k": "40"}, TYPE, "top_k", "an integer"),
    (TEXT, {"min_p": 2}, VALUE, "min_p", "at most 1"),
    (TEXT, {"n": 0}, VALUE, "n", "at least 1"),
    (TEXT, {"n": 1.5}, TYPE, "n", "an integer"),
    (TEXT, {"seed": "x"}, TYPE, "seed", "an integer"),
    (TEXT, {"seed": 2**63}, VALUE, "seed", "less than"),
    (TEXT, {"presence_penalty": -3}, VALUE, "presence_penalty", "at least -2"),
    (TEXT, {"frequency_penalty": 3}, VALUE, "frequency_penalty", "at most 2"),
    (TEXT, {"frequency_penalty": None, "repetition_penalty": "x"}, TYPE, "repetition_penalty",
     "a number"),
    (TEXT, {"stop": ["a"] * 33}, VALUE, "stop", "at most 32"),
    (TEXT, {"stop": ["a" * 999] * 5}, VALUE, "stop", "at most 4096"),
    (TEXT, {"stop": {"a": 1}}, TYPE, "stop", "a string or an array"),
    (TEXT, {"stop": [None]}, TYPE, "stop[0]", "a string"),
    (TEXT, {"logit_bias": {"1.5": 1}}, VALUE, "logit_bias", "not a token id"),
    (TEXT, {"logit_bias": {"\u0661": 1}}, VALUE, "logit_bias", "not a token id"),
    (TEXT, {"logit_bias": {"1": -100.5}}, VALUE, "logit_bias", "between -100 and 100"),
    (TEXT, {"logit_bias": {"1": None}}, TYPE, "logit_bias.1", "a number"),
    (TEXT, {"min_tokens": 17}, VALUE, "min_tokens", "here 16"),
    (TEXT, {"min_tokens": "3"}, TYPE, "min_tokens", "an integer"),
    (TEXT, {"stop_token_ids": list(range(129))}, VALUE, "stop_token_ids", "at most 128"),
    (TEXT, {"stop_token_ids": {"1": 2}}, TYPE, "stop_token_ids", "an array"),
    (TEXT, {"ignore_eos": 0}, TYPE, "ignore_eos", TRUTH),
    (TEXT, {"include_stop_str_in_output": "no"}, TYPE, "include_stop_str_in_output", TRUTH),
    (CHAT, {"include_stop_str_in_output": 1}, TYPE, "include_stop_str_in_output", TRUTH),
    (TEXT, {"skip_special_tokens": "true"}, TYPE, "skip_special_tokens", TRUTH),
    (CHAT, {"skip_special_tokens": 0}, TYPE, "skip_special_tokens", TRUTH),
    (TEXT, {"prompt_logprobs": -1}, VALUE, "prompt_logprobs", "at least 0"),
    (TEXT, {"prompt_logprobs": 21}, VALUE, "prompt_logprobs", "at most 20"),
    (TEXT, {"prompt_logprobs": True}, TYPE, "prompt_logprobs", "an integer"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, VALUE, "prompt_logprobs", "`stream`"),
    (TEXT, {"priority": 0.5}, TYPE, "priority", "an integer"),
    (TEXT, {"priority": -(2**31) - 1}, VALUE, "priority", "at least"),
    (TEXT, {"cache_salt": 5}, TYPE, "cache_salt", "a string"),
    (TEXT, {"cache_salt": ""}, VALUE, "cache_salt", "at least 1"),
    (TEXT, {"user": ["me"]}, TYPE, "user", "a string"),
    (TEXT, {"stream": "true"}, TYPE, "stream", TRUTH),
    (TEXT, {"logprobs": 2.5}, TYPE, "logprobs", "an integer"),
    (TEXT, {"add_special_tokens": "no"}, TYPE, "add_special_tokens", TRUTH),
    (TEXT, {"max_tokens": "many"}, TYPE, "max_tokens", "an integer"),
    (TEXT, {"max_tokens": None, "echo": 1}, TYPE, "echo", TRUTH),
    (TEXT, {"max_completion_tokens": 5}, UNSUPPORTED, "max_completion_tokens", "`max_tokens`"),
    (TEXT, {"top_logprobs": 5}, UNSUPPORTED, "top_logprobs", "`logprobs`"),
    (TEXT, {"prompt_embeds": "AAAA"}, UNSUPPORTED, "prompt_embeds", "text or token ids"),
    (TEXT, {"metadata": {}}, UNKNOWN, "metadata", "not a parameter"),
    # chat alone
    (CHAT, {"logprobs": "yes"}, TYPE, "logprobs", TRUTH),
    (CHAT, {"logprobs": True, "top_logprobs": 1.5}, TYPE, "top_logprobs", "an integer"),
    (CHAT, {"max_completion_tokens": -1}, VALUE, "max_completion_tokens", "at least 1"),
    (CHAT, {"max_completion_tokens": "5"}, TYPE, "max_completion_tokens", "an integer"),
    (CHAT, {"max_completion_tokens": CONTEXT}, TOO_LONG, "messages", "maximum context length"),
    (CHAT, {"add_generation_prompt": "no"}, TYPE, "add_generation_prompt", TRUTH),
    (CHAT, {"continue_final_message": 1}, TYPE, "continue_final_message", TRUTH),
    (CHAT, {KWARGS: []}, TYPE, KWARGS, "an object"),
    (CHAT, {KWARGS: {"x": {"y": 1}}}, TYPE, f"{KWARGS}.x", "a number"),
    (CHAT, {KWARGS: {str(key): 1 for key in range(33)}}, VALUE, KWARGS, "at most 32"),
    (CHAT, {KWARGS: {"tools": "x"}}, VALUE, f"{KWARGS}.tools", "set by the server"),
    (CHAT, {KWARGS: {"_private": 1}}, VALUE, f"{KWARGS}._private", "set by the server"),
    (CHAT, {KWARGS: {"tokenize": True}}, VALUE, f"{KWARGS}.tokenize", "set by the server"),
    (CHAT, {"metadata": []}, TYPE, "metadata", "an object"),
    (CHAT, {"metadata": {"a": None}}, TYPE, "metadata.a", "a string"),
    (CHAT, {"safety_identifier": 5}, TYPE, "safety_identifier", "a string"),
    (CHAT, {"prompt_cache_key": {}}, TYPE, "prompt_cache_key", "a string"),
    (CHAT, {"service_tier": 1}, VALUE, "service_tier", "'auto' or 'default'"),
    (CHAT, {"store": 0}, TYPE, "store", "true or false"),
    (CHAT, {"modalities": "text"}, UNSUPPORTED, "modalities", '["text"]'),
    (CHAT, {"documents": [{}]}, UNSUPPORTED, "documents", "into a message"),
    (CHAT, {"add_special_tokens": True}, UNSUPPORTED, "add_special_tokens", "chat template"),
    (CHAT, {"prompt_cache_retention": "24h"}, UNSUPPORTED, "prompt_cache_retention", "in_memory"),
    (CHAT, {"use_beam_search": True}, UNSUPPORTED, "use_beam_search", "sampling"),
    (CHAT, {"length_penalty": 0.5}, UNSUPPORTED, "length_penalty", "beam search"),
    (CHAT, {"spaces_between_special_tokens": False}, UNSUPPORTED,
     "spaces_between_special_tokens", "not supported"),
    (CHAT, {"request_id": "x"}, UNSUPPORTED, "request_id", "`X-Request-Id`"),
    (CHAT, {"kv_transfer_params": {}}, UNSUPPORTED, "kv_transfer_params", "not supported"),
    (CHAT, {"moderation": {}}, UNSUPPORTED, "moderation", "not supported"),
    (CHAT, {"max_new_tokens": 5}, UNKNOWN, "max_new_tokens", "did you mean `max_tokens`"),
    (CHAT, {"TEMPERATURE": 1}, UNKNOWN, "TEMPERATURE", "not a parameter"),
    # messages
    (CHAT, message(name=5), TYPE, f"{M0}.name", "a string"),
    (CHAT, message(name="x" * 257), VALUE, f"{M0}.name", "at most 256"),
    (CHAT, message(refusal=5), TYPE, f"{M0}.refusal", "a string"),
    (CHAT, message(content=True), TYPE, f"{M0}.content", "a string or an array"),
    (CHAT, message(content=[{"type": "text", "text": "x"}] * 1025), VALUE, f"{M0}.content",
     "at most 1024"),
    (CHAT, message(content=[{"type": "text", "text": "x", "lang": "en"}]), UNKNOWN,
     f"{M0}.content[0].lang", "not a parameter"),
    (CHAT, message(content=[{"type": "refusal", "refusal": "x"}]), UNSUPPORTED,
     f"{M0}.content[0].type", "text only"),
    (CHAT, message(role="assistant", content=[{"type": "refusal"}]), MISSING,
     f"{M0}.content[0].refusal", "required"),
    (CHAT, message(refusal="x"), VALUE, f"{M0}.refusal", "role assistant"),
    (CHAT, message(role="assistant", refusal="x"), VALUE, f"{M0}.refusal", "one of the two"),
    (CHAT, message(role="assistant", content=None, refusal=""), MISSING, f"{M0}.content",
     "neither"),
    (CHAT, message(role="assistant", content=None), MISSING, f"{M0}.content", "neither"),
    (CHAT, message(role="system", content=None), MISSING, f"{M0}.content", "role system"),
    (CHAT, message(role="function"), VALUE, f"{M0}.role", "'assistant'"),
    (CHAT, message(tool_calls=[{}]), MISSING, f"{M0}.tool_calls[0].id", "required"),
    (CHAT, message(role="assistant", tool_call_id="1"), VALUE, f"{M0}.tool_call_id", "role tool"),
    (CHAT, call(type="web"), VALUE, f"{M0}.tool_calls[0].type", "or 'custom'"),
    (CHAT, call(id=7), TYPE, f"{M0}.tool_calls[0].id", "a string"),
    (CHAT, call(function={"name": "f"}), MISSING, f"{M0}.tool_calls[0].function.arguments",
     "required"),
    (CHAT, call(function={"name": "", "arguments": "{}"}), VALUE,
     f"{M0}.tool_calls[0].function.name", "at least 1"),
    (CHAT, call(function={"name": "f", "arguments": {}}), TYPE,
     f"{M0}.tool_calls[0].function.arguments", "a string"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_wrong_value_is_refused_by_name(
    fake: FakeServer, http: httpx.Client, row: tuple[Any, ...]
):
    route, change, code, param, words = row
    asked = len(fake.engine.requests)
    answer = http.post(route, json=spoilt(route, change))
    check(answer, 400, code, param, words)
    assert len(fake.engine.requests) == asked, "a refused request must not reach the engine"


# method, path, headers, status, code, words
OUTSIDE: list[tuple[str, str, dict[str, str], int, str, str]] = [
    ("GET", "/v1/requests/nobody", {}, 404, "request_not_found", "`nobody`"),
    ("POST", "/v1/requests/nobody", {}, 405, "method_not_allowed", "POST"),
    ("DELETE", "/v1/requests/nobody", {}, 405, "method_not_allowed", "DELETE"),
    ("GET", "/v1/requests", {}, 404, "not_found", "/docs"),
    ("GET", "/v1/requests/", {}, 404, "not_found", "/docs"),
    ("GET", "/v1/requests/a/b", {}, 404, "not_found", "/docs"),
    ("PUT", TEXT, {}, 405, "method_not_allowed", "PUT"),
    ("PATCH", CHAT, {}, 405, "method_not_allowed", "PATCH"),
    ("POST", "/v1/completions/", {}, 404, "not_found", "do you mean /v1/completions?"),
    ("POST", "/completions", {}, 404, "not_found", "do you mean /v1/completions?"),
    ("POST", "/v1/responses/compact", {}, 404, "not_found", "`truncation` auto"),
    ("POST", "/v1/conversations", {}, 404, "not_found", "`previous_response_id`"),
    ("POST", "/v1/v1/completions", {}, 404, "not_found", "do you mean /v1/completions?"),
    ("GET", "/v1/", {}, 404, "not_found", "no route GET /v1/: see /docs"),
    ("POST", "/v1/engines/x/completions", {}, 404, "not_found", "no route"),
    ("POST", TEXT, {"content-encoding": "br"}, 415, "unsupported_media_type", "compression"),
    ("POST", TEXT, {"content-type": "text/json"}, 415, "unsupported_media_type", "text/json"),
    ("GET", "/v1/models?order=asc", {}, 400, "unknown_parameter", "`order`"),
    ("GET", "/v1/models?limit=0", {}, 400, "invalid_value", "from 1 to 1000"),
    ("GET", "/v1/models?after_id=nobody", {}, 404, "model_not_found", "`nobody`"),
    ("GET", "/v1/models", {"x-long": "x" * 70_000}, 431, "headers_too_large", "headers"),
]


@pytest.mark.parametrize("row", OUTSIDE, ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}")
def test_a_wrong_route_gets_an_error_that_says_where_to_go(
    http: httpx.Client, row: tuple[str, str, dict[str, str], int, str, str]
):
    method, path, headers, status, code, words = row
    answer = http.request(method, path, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert words in error["message"]
