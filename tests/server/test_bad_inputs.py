"""What each wrong field is told: status, code, param and the words that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from fake_engine import CONTEXT, VOCAB, FakeServer, fake_server
from spoilt_requests import (
    CHAT,
    JSON,
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
    messages,
    row_name,
    spoilt,
)  # fmt: skip


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_server(tmp_path_factory.mktemp("tokenizer")) as server:
        yield server


@pytest.fixture(scope="module")
def http(fake: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake.url) as client:
        yield client


def part(kind: str, **fields: object) -> dict[str, Any]:
    return messages([{"type": "text", "text": "see"}, {"type": kind, **fields}])


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", *names)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"tools": [tool("f")], "tool_choice": choice}


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
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}, MISSING,
     f"{M0}.content", "neither `content` nor `tool_calls`"),
    # how many, before it costs anything
    (CHAT, messages(*[[{"type": "text", "text": "x"}] * 1024] * 17), VALUE, "messages",
     "more than 16384"),
    (CHAT, messages([None] * 100_000), VALUE, "messages", "more than 16384"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{}"}}] * 128}] * 129}, VALUE,
     "messages", "tool calls in all"),
    (CHAT, messages(*["x"] * 16385), VALUE, "messages", "at most 16384"),
    (CHAT, messages([{"type": "text", "text": "x"}] * 1025), VALUE, f"{M0}.content",
     "at most 1024"),
    ("/tokenize", {"prompt": REMOVED} | messages(*[[{"type": "text", "text": "x"}] * 1024] * 17),
     VALUE, "messages", "more than 16384"),
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
    (CHAT, {"seed": 10**30}, TYPE, "seed", "an integer of at most 64 bits"),
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
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, UNSUPPORTED,
     "chat_template_kwargs.enable_thinking", "chat template knows"),
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
    (TEXT, {"prompt": ["a", ""]}, VALUE, "prompt[1]", "the prompt `prompt[1]` has no tokens"),
    (TEXT, {"prompt": [[]]}, VALUE, "prompt[0]", "at least 1"),
    (TEXT, {"prompt": [1, "a"]}, TYPE, "prompt[1]", "an integer"),
    (TEXT, {"prompt": ["a", 1]}, TYPE, "prompt[1]", "a string"),
    (TEXT, {"prompt": [1.5]}, TYPE, "prompt[0]", "an integer"),
    (TEXT, {"prompt": [True]}, TYPE, "prompt[0]", "an integer"),
    (TEXT, {"prompt": [VOCAB]}, VALUE, "prompt", f"0 to {VOCAB - 1}"),
    (TEXT, {"prompt": [[1], [-1]]}, VALUE, "prompt[1]", "-1"),
    (TEXT, {"prompt": ["a", "word " * 400]}, TOO_LONG, "prompt[1]", "`prompt[1]` has 801 tokens"),
    (TEXT, {"prompt": ["a", "w" * 100_000]}, TOO_LONG, "prompt[1]", "100000 characters"),
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
    (CHAT, {"tools": [tool("a b")]}, VALUE, "tools[0].function.name",
     'is "a b": it may have only a-z, A-Z, 0-9, _, . and -'),
    (CHAT, {"tools": [tool("f", parameters={"type": "array"})]}, VALUE,
     "tools[0].function.parameters", "of type object"),
    (CHAT, {"tools": [tool("f", parameters=[])]}, TYPE, "tools[0].function.parameters", "object"),
    (CHAT, {"tools": [tool("f", strict=1)]}, TYPE, "tools[0].function.strict", "true or false"),
    (CHAT, {"tools": [tool("f") | {"type": "web"}]}, VALUE, "tools[0].type", "or 'custom'"),
    (CHAT, {"tool_choice": "auto"}, VALUE, "tool_choice", "needs `tools`"),
    (CHAT, {"tool_choice": "any"}, VALUE, "tool_choice", "'required'"),
    (CHAT, {"tool_choice": 1}, TYPE, "tool_choice", "required"),
    (CHAT, {"tools": [tool("f")], "tool_choice": tool("g")}, VALUE, "tool_choice.function.name",
     "not among `tools`"),
    (CHAT, allowed("g"), VALUE, "tool_choice.allowed_tools.tools[1].function.name", "not among"),
    (CHAT, allowed("f", mode="none"), VALUE, "tool_choice.allowed_tools.mode", "'required'"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, MISSING, "tool_choice.allowed_tools",
     "required"),
    (CHAT, {"tool_choice": {"type": "web"}}, VALUE, "tool_choice.type",
     "'function', 'custom' or 'allowed_tools'"),
    (CHAT, {"tools": [{"type": "web"}]}, VALUE, "tools[0].type", "'function' or 'custom'"),
    (CHAT, {"parallel_tool_calls": True}, VALUE, "parallel_tool_calls", "needs `tools`"),
    (CHAT, {"functions": [{"name": "f"}]}, UNSUPPORTED, "functions", "`tools`"),
    (CHAT, {"functions": [{}]}, UNSUPPORTED, "functions", "not supported"),
    (CHAT, {"response_format": {"type": "xml"}}, VALUE, "response_format.type", "'json_schema'"),
    (CHAT, {"modalities": ["text", "audio"]}, UNSUPPORTED, "modalities", "text"),
    (CHAT, {"audio": {"voice": "x"}}, UNSUPPORTED, "audio", "not supported"),
    (CHAT, {"prediction": {"type": "content"}}, MISSING, "prediction.content", "required"),
    (CHAT, {"web_search_options": {}}, UNSUPPORTED, "web_search_options", "not supported"),
    (CHAT, {"reasoning_effort": "high"}, UNSUPPORTED, "reasoning_effort", "no place"),
    (CHAT, {"service_tier": "priority"}, UNSUPPORTED, "service_tier", "default"),
    (CHAT, {"chat_template": "{{ 1 }}"}, UNSUPPORTED, "chat_template", "own template"),
    (CHAT, {"echo": True}, UNSUPPORTED, "echo", TEXT),
    (CHAT, {"guided_json": {}}, UNSUPPORTED, "guided_json", "not supported"),
    (CHAT, {"truncate_prompt_tokens": 0}, VALUE, "truncate_prompt_tokens", "at least 1"),
    (TEXT, {"suffix": "end"}, UNSUPPORTED, "suffix", "gap"),
    (CHAT, {"best_of": 2}, UNSUPPORTED, "best_of", "`n`"),
    (TEXT, {"best_of": True}, TYPE, "best_of", "an integer"),
    # what other servers have
    (CHAT, {"thinking_token_budget": -2}, VALUE, "thinking_token_budget", "at least -1"),
    (CHAT, {"thinking_token_budget": "many"}, TYPE, "thinking_token_budget", "an integer"),
    (CHAT, {"enable_thinking": True}, UNSUPPORTED, "enable_thinking", "`chat_template_kwargs`"),
    (CHAT, {"repeat_penalty": 1.1}, UNSUPPORTED, "repeat_penalty", "`repetition_penalty`"),
    (CHAT, {"stream_interval": 8}, UNSUPPORTED, "stream_interval", "use 1"),
    (TEXT, {"min_new_tokens": 5}, UNSUPPORTED, "min_new_tokens", "`min_tokens`"),
    (TEXT, {"cache_prompt": False}, UNSUPPORTED, "cache_prompt", "use true"),
    (TEXT, {"stop_regex": "x"}, UNSUPPORTED, "stop_regex", "`stop`"),
    (TEXT, {"enable_thinking": True}, UNKNOWN, "enable_thinking", "not a parameter"),
    # what nobody has
    (CHAT, {"temprature": 1}, UNKNOWN, "temprature", "did you mean `temperature`"),
    (CHAT, {"prompt": "Hello"}, UNKNOWN, "prompt", "not a parameter"),
    (TEXT, {"messages": []}, UNKNOWN, "messages", "not a parameter"),
    (TEXT, {"": 1}, UNKNOWN, "", "not a parameter"),
    (CHAT, {"model_config": 1}, UNKNOWN, "model_config", "not a parameter"),
    (CHAT, {"response_format": {"type": "structural_tag", "triggers": ["<"]}}, MISSING,
     "response_format.structures", "required with type structural_tag"),
    (TEXT, {"response_format": {"type": "text", "triggers": ["<"]}}, VALUE,
     "response_format.triggers", "does nothing with type text"),
    (CHAT, {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [
        {"begin": "x", "schema": {}, "end": ""}]}}, VALUE, "response_format.structures[0].begin",
     "starts with none"),
    # tokenize, detokenize
    ("/tokenize", {"prompt": REMOVED}, MISSING, "prompt", "either"),
    ("/tokenize", messages("x"), VALUE, "prompt", "either"),
    ("/tokenize", {"tools": [{"type": "function", "function": {"name": "f"}}]}, VALUE, "tools",
     "belongs to `messages`"),
    ("/tokenize", {"prompt": REMOVED, "add_special_tokens": True} | messages("x"), UNSUPPORTED,
     "add_special_tokens", "the chat template"),
    ("/tokenize", {"chat_template": "x"}, UNSUPPORTED, "chat_template", "the model's own"),
    ("/tokenize", {"prompt": 1}, TYPE, "prompt", "a string"),
    ("/tokenize", {"text": "x"}, UNKNOWN, "text", "not a parameter"),
    ("/detokenize", {"tokens": REMOVED}, MISSING, "tokens", "required"),
    ("/detokenize", {"tokens": "1"}, TYPE, "tokens", "an array"),
    ("/detokenize", {"tokens": [VOCAB]}, VALUE, "tokens", "not a token id"),
    ("/detokenize", {"tokens": [1, None]}, TYPE, "tokens[1]", "an integer"),
]  # fmt: skip


@pytest.mark.parametrize("row", FIELDS, ids=row_name)
def test_a_wrong_field_is_refused_by_name(
    fake: FakeServer, http: httpx.Client, row: tuple[Any, ...]
):
    route, change, code, param, words = row
    submitted = len(fake.engine.requests)
    answer = http.post(route, content=json.dumps(spoilt(route, change)), headers=JSON)
    check(answer, 400, code, param, words)
    assert len(fake.engine.requests) == submitted, "a refused request reached the engine"
