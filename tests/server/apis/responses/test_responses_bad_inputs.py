"""The error of each wrong request to /v1/responses: status, code, param, a message that helps."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.apis.responses.schema import RESPONSES_UNSUPPORTED, ResponsesRequest
from tests.support.examples import examples
from tests.support.server.fake_engine import CONTEXT
from tests.support.server.malformed_requests import REMOVED

URL = "/v1/responses"
BASE: dict[str, Any] = {"model": "fake", "input": "Hello"}
MISSING = "missing_required_parameter"
TYPE = "invalid_type"
VALUE = "invalid_value"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
I0 = "input[0]"
LOGPROBS = "message.output_text.logprobs"
FUNCTION = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


def items(*inputs: object) -> dict[str, Any]:
    return {"input": list(inputs)}


def part(kind: str, role: str = "user", **fields: object) -> dict[str, Any]:
    return items({"role": role, "content": [{"type": kind, **fields}]})


def form(**fields: object) -> dict[str, Any]:
    return {"text": {"format": fields}}


# what is changed in a good body, code, param, words of the message; the status is 400
FIELDS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"model": REMOVED}, MISSING, "model", "required"),
    ({"model": 7}, TYPE, "model", "a string"),
    ({"input": REMOVED}, MISSING, "input", "required"),
    ({"input": None}, TYPE, "input", "a string or an array of items"),
    ({"input": 5}, TYPE, "input", "a string or an array of items"),
    ({"input": {}}, TYPE, "input", "a string or an array of items"),
    ({"input": []}, VALUE, "input", "at least 1"),
    ({"input": "x" * 20000}, TOO_LONG, "input", f"context length is {CONTEXT} tokens"),
    ({"input": "one two three " * 40}, TOO_LONG, "input", "tokens"),
    ({"max_output_tokens": 255}, TOO_LONG, "input", "`max_output_tokens` is 255"),
    # items
    (items("Hello"), TYPE, I0, "an object of type message"),
    (items({}), TYPE, I0, "an object of type message"),
    (items({"role": "user"}), MISSING, f"{I0}.content", "required"),
    (items({"content": "x"}), MISSING, f"{I0}.role", "required"),
    (items({"role": "tool", "content": "x"}), VALUE, f"{I0}.role", "'assistant'"),
    (items({"role": "user", "content": 5}), TYPE, f"{I0}.content", "a string or an array"),
    (items({"role": "user", "content": []}), VALUE, f"{I0}.content", "at least 1"),
    (items({"role": "user", "content": ["x"]}), TYPE, f"{I0}.content[0]", "input_text"),
    (items({"role": "user", "content": "x", "mood": 1}), UNKNOWN, f"{I0}.mood", "not a parameter"),
    (part("input_text"), MISSING, f"{I0}.content[0].text", "required"),
    (part("input_text", text=1), TYPE, f"{I0}.content[0].text", "a string"),
    (part("text", text="x"), UNSUPPORTED, f"{I0}.content[0].type", "input_text"),
    (part("input_image", image_url="x"), UNSUPPORTED, f"{I0}.content[0].type", "text only"),
    (part("input_file", file_id="x"), UNSUPPORTED, f"{I0}.content[0].type", "text only"),
    (part("input_audio"), UNSUPPORTED, f"{I0}.content[0].type", "input_audio"),
    (part("output_text", text="x"), VALUE, f"{I0}.content[0].type", "type input_text"),
    (part("input_text", "assistant", text="x"), VALUE, f"{I0}.content[0].type", "output_text"),
    (items({"type": "web_search_call", "id": "x"}), UNSUPPORTED, f"{I0}.type", "web_search_call"),
    (items({"type": "compaction"}), UNSUPPORTED, f"{I0}.type", "compaction"),
    (items({"type": "custom_tool_call"}), MISSING, f"{I0}.call_id", "required"),
    (items({"type": "mcp_call"}), UNSUPPORTED, f"{I0}.type", "mcp_call"),
    (items(CALL | {"name": "a b"}), VALUE, f"{I0}.name", "0-9, _, . and -; rename"),
    (items(CALL | {"call_id": ""}), VALUE, f"{I0}.call_id", "at least 1"),
    (items(CALL | {"arguments": {}}), TYPE, f"{I0}.arguments", "a string"),
    (items(CALL), VALUE, I0, "no tool output found for function call c"),
    (items(OUTPUT), VALUE, f"{I0}.call_id", "no tool call found"),
    (items(CALL, OUTPUT, OUTPUT), VALUE, "input[2].call_id", "no tool call found"),
    (items(CALL, OUTPUT | {"output": 1}), TYPE, "input[1].output", "a string or an array"),
    (items(CALL, OUTPUT), VALUE, I0, "no place for tool calls"),
    (items({"type": "item_reference", "id": "msg_x"}), VALUE, f"{I0}.id", "not found"),
    (items({"id": ""}), VALUE, f"{I0}.id", "at least 1"),
    (items({"type": "reasoning", "summary": "x"}), TYPE, f"{I0}.summary", "an array"),
    (items(*[{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 1024}] * 17),
     VALUE, "input", "more than 16384"),
    (items(*[{"type": "reasoning", "summary": [None] * 1000}] * 17), VALUE, "input", "16384"),
    # sampling
    ({"temperature": 2.5}, VALUE, "temperature", "at most 2"),
    ({"temperature": "1"}, TYPE, "temperature", "a number"),
    ({"top_p": -0.1}, VALUE, "top_p", "at least 0"),
    ({"max_output_tokens": 0}, VALUE, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 1.5}, TYPE, "max_output_tokens", "an integer"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, VALUE, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, VALUE, "top_logprobs", "`include`"),
    ({"stop": ["a"] * 33}, VALUE, "stop", "at most 32"),
    ({"stop": ["a" * 999] * 5}, VALUE, "stop", "at most 4096"),
    ({"chat_template_kwargs": {"tools": "x"}}, VALUE, "chat_template_kwargs.tools", "the server"),
    # the names of other routes
    ({"messages": []}, UNSUPPORTED, "messages", "`input`"),
    ({"max_tokens": 5}, UNSUPPORTED, "max_tokens", "`max_output_tokens`"),
    ({"response_format": {"type": "json_object"}}, UNSUPPORTED, "response_format", "`text.format`"),
    ({"reasoning_effort": "low"}, UNSUPPORTED, "reasoning_effort", "`reasoning.effort`"),
    ({"n": 2}, UNSUPPORTED, "n", "several requests"),
    ({"temprature": 1}, UNKNOWN, "temprature", "did you mean `temperature`?"),
    # formats and tools
    ({"text": "plain"}, TYPE, "text", "an object"),
    (form(type="yaml"), TYPE, "text.format", 'json_schema, not an object whose type is "yaml"'),
    (form(type="json_schema", name="x"), MISSING, "text.format.schema", "required"),
    (form(type="json_schema", name="x y", schema={}), VALUE, "text.format.name", "rename it"),
    (form(type="json_schema", schema={}), MISSING, "text.format.name", "required"),
    ({"text": {"verbosity": "loud"}}, VALUE, "text.verbosity", "'medium'"),
    ({"text": {"verbosity": "low"}}, UNSUPPORTED, "text.verbosity", "chat template"),
    ({"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools[0].type", "web_search"),
    ({"tools": [FUNCTION, {"type": "mcp"}]}, UNSUPPORTED, "tools[1].type", "function"),
    ({"tools": [{"type": "function"}]}, MISSING, "tools[0].name", "required"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, MISSING, "tools[0].name", ""),
    ({"tools": [FUNCTION] * 129}, VALUE, "tools", "at most 128"),
    ({"tools": [FUNCTION] * 2}, VALUE, "tools[1].name", "an earlier tool"),
    ({"tools": [FUNCTION]}, UNSUPPORTED, "tools", "chat template"),
    ({"tool_choice": "required"}, VALUE, "tool_choice", "needs `tools`"),
    ({"tool_choice": "always"}, VALUE, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "file_search"}}, UNSUPPORTED, "tool_choice.type",
     "function, custom or allowed_tools"),
    ({"tool_choice": {"type": 5}}, VALUE, "tool_choice.type",
     "is 5: it must be 'function', 'custom' or 'allowed_tools'"),
    ({"tool_choice": {}}, MISSING, "tool_choice.type", "add it"),
    ({"tool_choice": 5}, TYPE, "tool_choice", "allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}}, VALUE,
     "tool_choice.tools[0].name", "not among `tools`"),
    # reasoning, storing, streaming
    ({"reasoning": {"effort": "huge"}}, VALUE, "reasoning.effort", "'medium'"),
    ({"reasoning": {"effort": "high"}}, UNSUPPORTED, "reasoning.effort", "chat template"),
    ({"reasoning": {"context": "all_turns"}}, VALUE, "reasoning.context", "'auto'"),
    ({"reasoning": {"mode": "pro"}}, VALUE, "reasoning.mode", "'standard'"),
    ({"reasoning": {"summary": "none"}}, VALUE, "reasoning.summary", "'detailed'"),
    ({"include": ["everything"]}, VALUE, "include[0]", "'message.output_text.logprobs'"),
    ({"previous_response_id": "resp_x"}, "previous_response_not_found", "previous_response_id",
     "'resp_x' not found"),
    ({"previous_response_id": 5}, TYPE, "previous_response_id", "a string"),
    ({"background": True, "store": False}, VALUE, "store", "`background`"),
    ({"stream_options": {}}, VALUE, "stream_options", "`stream` is true"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, UNSUPPORTED,
     "stream_options.include_obfuscation", "use false"),
    ({"stream": "yes"}, TYPE, "stream", "true or false"),
    ({"store": 1}, TYPE, "store", "true or false"),
    ({"metadata": {str(n): "x" for n in range(17)}}, VALUE, "metadata", "at most 16"),
    ({"max_tool_calls": 0}, VALUE, "max_tool_calls", "at least 1"),
    ({"truncation": "middle"}, VALUE, "truncation", "'auto'"),
    ({"truncation": "auto", "input": "one two three " * 40}, TOO_LONG, "input", "tokens"),
    ({"conversation": "conv_1"}, UNSUPPORTED, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, UNSUPPORTED, "prompt", "instructions"),
    ({"context_management": [{"type": "x"}]}, UNSUPPORTED, "context_management", "shorten"),
    ({"background_options": {"completion_window": "2h"}}, UNSUPPORTED, "background_options",
     "soonest"),
    ({"personality": "friendly"}, UNSUPPORTED, "personality", "`instructions`"),
    ({"service_tier": "flex"}, UNSUPPORTED, "service_tier", "default"),
    ({"prompt_cache_retention": "24h"}, UNSUPPORTED, "prompt_cache_retention", "in_memory"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "param", "words"), FIELDS, ids=str)
def test_the_error_of_a_wrong_field_names_it(
    http: httpx.Client, change: dict[str, Any], code: str, param: str | None, words: str
):
    body = {name: value for name, value in (BASE | change).items() if value is not REMOVED}
    answer = http.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


QUERIES: list[tuple[str, str, int, str, str | None]] = [
    ("GET", "/resp_x", 404, "not_found", None),
    ("GET", "/resp_x?stream=true", 404, "not_found", None),
    ("DELETE", "/resp_x", 404, "not_found", None),
    ("POST", "/resp_x/cancel", 404, "not_found", None),
    ("GET", "/resp_x/input_items", 404, "not_found", None),
    ("GET", "/resp_x?starting_after=3", 400, VALUE, "starting_after"),
    ("GET", "/resp_x?stream=true&starting_after=-1", 400, VALUE, "starting_after"),
    ("GET", "/resp_x?stream=true&starting_after=x", 400, TYPE, "starting_after"),
    ("GET", "/resp_x?stream=maybe", 400, TYPE, "stream"),
    ("GET", "/resp_x?stream=true&stream=false", 400, VALUE, "stream"),
    ("GET", "/resp_x?include_obfuscation=true", 400, UNSUPPORTED, "include_obfuscation"),
    ("GET", "/resp_x?include[]=all", 400, VALUE, "include[0]"),
    ("GET", "/resp_x?steam=true", 400, UNKNOWN, "steam"),
    ("DELETE", "/resp_x?force=true", 400, UNKNOWN, "force"),
    ("GET", "/resp_x/input_items?limit=0", 400, VALUE, "limit"),
    ("GET", "/resp_x/input_items?limit=101", 400, VALUE, "limit"),
    ("GET", "/resp_x/input_items?limit=few", 400, TYPE, "limit"),
    ("GET", "/resp_x/input_items?order=up", 400, VALUE, "order"),
    ("GET", "/resp_x/input_items?order=true", 400, VALUE, "order"),
]
# what the message says
NAMED = [
    ("/resp_x/input_items?limit=abc", '`limit` is "abc": it must be an integer from 1 to 100'),
    ("/resp_x/input_items?limit=-1", "from 1 to 100; or leave it out for 20"),
    (f"/resp_x/input_items?limit={'9' * 5000}", "a text of 5000 characters"),
    ("/resp_x?stream=1", '`stream` is "1": it must be true or false; or leave it out'),
    ("/resp_x?starting_after=x&stream=true", "an integer from 0 to 2147483647; or leave it out"),
]


@pytest.mark.parametrize(("path", "words"), NAMED)
def test_a_wrong_type_in_a_query_names_what_is_taken(http: httpx.Client, path: str, words: str):
    answer = http.get(URL + path)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(("method", "path", "status", "code", "param"), QUERIES)
def test_a_wrong_path_or_query_is_an_error(
    http: httpx.Client, method: str, path: str, status: int, code: str, param: str | None
):
    answer = http.request(method, URL + path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error


def test_a_page_after_an_unknown_item_is_refused(http: httpx.Client):
    id = http.post(URL, json=BASE).json()["id"]
    answer = http.get(f"{URL}/{id}/input_items?after=msg_x")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "after"
    answer = http.get(f"{URL}/{id}/input_items?after=4")  # no number, but an id that is not there
    assert answer.json()["error"]["param"] == "after", answer.text
    assert "4" in answer.json()["error"]["message"] and "string" not in answer.text


def test_an_unknown_model_is_404_even_with_a_previous_response(http: httpx.Client):
    answer = http.post(URL, json=BASE | {"model": "gpt", "previous_response_id": "resp_x"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", RESPONSES_UNSUPPORTED)
def test_null_asks_for_nothing(http: httpx.Client, name: str):
    assert http.post(URL, json=BASE | {name: None}).status_code == 200


def test_values_that_mean_what_is_done_anyway_are_taken(http: httpx.Client):
    usual = {
        "background": False,
        "context_management": [],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "max_tool_calls": 4,
        "parallel_tool_calls": True,
        "prompt_cache_options": {"mode": "implicit"},
        "reasoning": {
            "context": "auto",
            "effort": "none",
            "mode": "standard",
            "summary": "detailed",
        },
        "service_tier": "auto",
        "stream_options": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    answer = http.post(URL, json=BASE | usual)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("index", ["0", "9", "9" * 100])
def test_what_an_error_quotes_of_a_caller_is_not_taken_for_a_path(http: httpx.Client, index: str):
    quoted = f"`messages[0].tool_calls[{index}].x`"
    body = BASE | form(type="json_schema", name="a", schema={"type": quoted})
    answer = http.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    assert quoted in answer.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@examples(120)
@given(changes=st.dictionaries(st.sampled_from(sorted(ResponsesRequest.model_fields)), JSON))
def test_no_json_body_causes_an_internal_error(http: httpx.Client, changes: dict[str, Any]):
    answer = http.post(URL, json=BASE | changes | {"background": False})
    assert answer.status_code in (200, 400, 404), answer.text
