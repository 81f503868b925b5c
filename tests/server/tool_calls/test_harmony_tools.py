"""What a model that writes harmony's messages must say, through the whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import PARAMETERS, QUESTION, qwen_server

HARMONY = "{# <|channel|>commentary to=functions.example #}"
# The fake model has a token <|end|> of its own, which ends answers.
REASONING = "<|channel|>analysis<|message|>Rome, then.<|return|><|start|>assistant"
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
FINAL = '<|channel|>final<|message|>{"city": "Rome"}<|return|>'
BODY: dict[str, Any] = {"model": "fake", "messages": QUESTION}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, HARMONY) as server:
        yield server


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_can_be_required(fake: FakeServer, choice: Any):
    fake.say(REASONING + CALL)
    answer = fake.client().chat.completions.create(**BODY, **TOOLS, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert (answer.message.model_extra or {})["reasoning"] == "Rome, then."
    assert "functions\\\\." in fake.engine.requests[-1].params.grammar


@pytest.mark.parametrize("more", [{}, TOOLS])
def test_a_format_is_that_of_the_final_message(fake: FakeServer, more: dict[str, Any]):
    fake.say(REASONING + FINAL)
    answer = fake.client().chat.completions.create(**BODY, **more, response_format=FORMAT)
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Rome"}
    grammar = fake.engine.requests[-1].params.grammar
    assert "/final/" in grammar and "/analysis/" in grammar
    assert ("weather" in grammar) == bool(more)


def test_a_limit_of_reasoning_needs_delimiters_that_are_tokens(fake: FakeServer):
    body = {**BODY, "extra_body": {"thinking_token_budget": 5}}
    with pytest.raises(openai.BadRequestError, match="in the format harmony"):
        fake.client().chat.completions.create(**body)
    begun = [*QUESTION, {"role": "assistant", "content": "It is "}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    extra = body["extra_body"] | goes_on
    fake.client().chat.completions.create(model="fake", messages=begun, extra_body=extra)
    assert fake.engine.requests[-1].params.grammar == ""  # reasoning is over


def test_an_answer_that_goes_on_has_the_format_at_once(fake: FakeServer):
    begun = [*QUESTION, {"role": "assistant", "content": "It is "}]
    fake.say('{"city": "Rome"}')
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    body = {"model": "fake", "messages": begun, "response_format": FORMAT, "extra_body": extra}
    answer = fake.client().chat.completions.create(**body).choices[0]
    assert answer.message.content == '{"city": "Rome"}'
    assert "/final/" not in fake.engine.requests[-1].params.grammar
