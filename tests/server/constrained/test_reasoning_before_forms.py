"""Whether a structured output may begin with reasoning: as the chat template has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer

from tests.support.server.fake_engine import write_tokenizer
from tests.support.server.qwen_fake_model import CAN_BE_QUIET, qwen_server

SWITCH = "{% if enable_thinking %}<think>\n{% endif %}"
LEVEL = "{% if (reasoning_effort or 'none') != 'none' %}<think>\n{% endif %}"
ALWAYS = "<think>\n"
ON: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
PLAIN, REASONED, REST = '{"a": 1}', '<think>\nhm\n</think>\n\n{"a": 1}', 'hm\n</think>\n\n{"a": 1}'


def takes(grammar: str, text: str, folder: Path) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=0), grammar)
    assert not matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("thinking", "fields", "allowed"),
    [
        ("", {}, {PLAIN, REASONED}),  # the model thinks unasked, or does not
        (CAN_BE_QUIET, {}, {PLAIN, REASONED}),
        (CAN_BE_QUIET, ON, {PLAIN, REASONED}),
        (CAN_BE_QUIET, OFF, {PLAIN}),  # the reasoning is over where the answer begins
        (CAN_BE_QUIET, {"reasoning_effort": "none"}, {PLAIN}),
        (SWITCH, {}, {PLAIN}),  # the prompt begins reasoning that is requested
        (SWITCH, OFF, {PLAIN}),
        (SWITCH, ON, {REST, REASONED}),
        (LEVEL, {}, {PLAIN}),
        (LEVEL, {"reasoning_effort": "low"}, {REST, REASONED}),
        (ALWAYS, {}, {REST, REASONED}),
    ],
)
def test_a_form_comes_after_the_reasoning_that_the_template_leaves_room_for(
    tmp_path_factory: pytest.TempPathFactory,
    thinking: str,
    fields: dict[str, Any],
    allowed: set[str],
):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    folder = write_tokenizer(tmp_path_factory.mktemp("words"))
    with qwen_server(tmp_path_factory, thinking) as fake:
        url = f"{fake.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | fields | {"response_format": form})
        assert answer.status_code == 200, answer.text
        grammar = fake.engine.requests[-1].params.grammar
    assert json.loads(grammar)
    assert {text for text in (PLAIN, REASONED, REST) if takes(grammar, text, folder)} == allowed
