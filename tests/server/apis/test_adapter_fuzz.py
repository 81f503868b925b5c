"""No body, however odd, makes Anthropic's or Ollama's routes fail, or answer in a strange form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.apis.anthropic.checks import UNSUPPORTED as ANTHROPIC_UNSUPPORTED
from server.apis.anthropic.schema import (
    AnthropicTool,
    AnthropicToolChoice,
    MessagesRequest,
    OutputConfig,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.apis.ollama.request import REFUSED_FIELDS, REFUSED_OPTIONS
from server.apis.ollama.schema import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from tests.support.examples import examples
from tests.support.server.fake_engine import fake_server

# Mentions all that a template can, so that nothing is refused for its sake.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{# enable_thinking reasoning_effort </think> #}"
)
HELLO = [{"role": "user", "content": "Hello"}]
BASE: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "fake", "max_tokens": 5, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "fake", "messages": HELLO},
    "/api/chat": {"model": "fake", "messages": HELLO},
    "/api/generate": {"model": "fake", "prompt": "Hello"},
}
WORDS = (
    *("user", "assistant", "tool", "system", "fake", "text", "tool_use", "tool_result"),
    *("thinking", "image", "enabled", "adaptive", "disabled", "auto", "any", "none", "custom"),
    *("json", "low", "5m", "json_schema", "object", "ephemeral"),
)
BLOCKS = (TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock, Thinking, AnthropicToolChoice)
KEYS = sorted(
    {name for model in (*BLOCKS, AnthropicTool, OutputConfig, OllamaMessage, OllamaOptions)
     for name in model.model_fields} | {*REFUSED_OPTIONS, "schema", "function", "arguments"}
)  # fmt: skip
NAMES = sorted(
    {name for model in (MessagesRequest, OllamaChatBody, OllamaGenerateBody)
     for name in model.model_fields} | {*ANTHROPIC_UNSUPPORTED, *REFUSED_FIELDS}
)  # fmt: skip

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOD_BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "x"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "1", "content": "x"},
    {"type": "thinking", "thinking": "x", "signature": "x"},
]
some = st.dictionaries(st.sampled_from(KEYS), values, max_size=2)


def changed(good: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return good | change


blocks = st.builds(changed, st.sampled_from(GOOD_BLOCKS), some)
contents = st.one_of(st.just("x"), st.lists(blocks, max_size=3), values)
messages = st.builds(
    lambda role, content, more: {"role": role, "content": content} | more,
    st.sampled_from(WORDS[:4]),
    contents,
    st.dictionaries(st.sampled_from(["tool_calls", "images", "tool_name"]), values, max_size=1),
)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with (
        fake_server(folder, template=TEMPLATE) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


@examples(250)
@given(
    route=st.sampled_from(list(BASE)),
    change=st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
    turns=st.lists(messages, max_size=3),
)
def test_no_json_makes_a_route_fail(
    http: httpx.Client, route: str, change: dict[str, Any], turns: list[dict[str, Any]]
):
    body = BASE[route] | change
    if turns and route != "/api/generate":
        body["messages"] = turns
    answer = http.post(
        route, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        assert '"error"' not in answer.text
    elif route.startswith("/api"):
        assert set(answer.json()) == {"error"} and answer.json()["error"]
    else:
        assert set(answer.json()) == {"type", "error", "request_id"}
