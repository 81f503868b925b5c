"""Grammars of answers in harmony's messages, asked of the library itself."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from server.constrained.grammar_text import Grammar
from server.constrained.reasoning_grammar import after_reasoning, in_final_message
from server.constrained.response_format import json_grammar
from server.errors import FieldPath
from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from tests.support.parsing.tool_grammars import (
    PARAMETERS,
    accepts,
    grammar_of,
    literals_of,
    tokenizer_with_special,
    tool,
)

REASONING = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CALL = HEAD + '{"city": "Rome"}'
WRONG = HEAD + '{"city": 1}'
FINAL = "<|channel|>final<|message|>"
STRICT = [tool("weather", parameters=PARAMETERS, strict=True), tool("now")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


def with_reasoning(
    tokenizer: Tokenizer, grammar: Grammar | None, *, begun: bool = False
) -> Grammar:
    assert grammar is not None
    return after_reasoning(
        grammar, REASONING_FORMATS["harmony"], literals_of(tokenizer), begun=begun
    )


def test_a_call_that_must_be_made_may_follow_reasoning_and_nothing_else(tokenizer: Tokenizer):
    grammar = with_reasoning(tokenizer, grammar_of(tokenizer, "harmony", tool_choice="required"))
    for text in (CALL, REASONING + CALL, REASONING + REASONING + CALL):
        assert accepts(tokenizer, grammar, text), text
    for text in (
        WRONG,
        COMMENTARY + CALL,
        FINAL + "Hello",
        REASONING + FINAL + "Hello",
        "Hello",
        REASONING,
    ):
        assert not accepts(tokenizer, grammar, text), text
    parser = AnswerParser(
        TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"], tools={"weather": PARAMETERS}
    )
    reasoning, call = parser.feed(REASONING + CALL) + parser.end()
    assert reasoning == ReasoningDelta("Let me see.")
    assert isinstance(call, ToolCallDelta) and call.name == "weather"
    assert call.arguments == '{"city": "Rome"}'


def test_reasoning_that_the_prompt_has_begun_is_ended_first(tokenizer: Tokenizer):
    required = grammar_of(tokenizer, "harmony", tool_choice="required")
    grammar = with_reasoning(tokenizer, required, begun=True)
    assert accepts(tokenizer, grammar, "so.<|end|><|start|>assistant" + CALL)
    assert not accepts(tokenizer, grammar, CALL)


@pytest.mark.parametrize("before", ["", REASONING, COMMENTARY, REASONING + COMMENTARY])
def test_strict_tools_leave_messages_free_and_bind_the_calls(tokenizer: Tokenizer, before: str):
    grammar = with_reasoning(tokenizer, grammar_of(tokenizer, "harmony", tools=STRICT))
    now = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"any": [1]}'
    for text in (CALL, now, FINAL + "It is sunny.", FINAL):
        assert accepts(tokenizer, grammar, before + text), text
    for text in (WRONG, CALL.replace("weather", "nobody")):
        assert not accepts(tokenizer, grammar, before + text), text


def test_a_format_for_the_answer_is_that_of_its_final_message(tokenizer: Tokenizer):
    requested = json_grammar({"type": "object", "required": ["a"]}, FieldPath("response_format"))
    requested = in_final_message(requested, literals_of(tokenizer))
    alone = with_reasoning(tokenizer, requested)
    with_tools = with_reasoning(tokenizer, grammar_of(tokenizer, "harmony", requested))
    for grammar, calls in ((alone, False), (with_tools, True)):
        for before in ("", REASONING):
            assert accepts(tokenizer, grammar, before + FINAL + '{"a": 1}')
            assert accepts(tokenizer, grammar, before + CALL) == calls
            assert not accepts(tokenizer, grammar, before + FINAL + '{"b": 1}')
            assert not accepts(tokenizer, grammar, before + WRONG)
            assert not accepts(tokenizer, grammar, COMMENTARY + FINAL + '{"a": 1}')
    parser = AnswerParser(None, REASONING_FORMATS["harmony"], tools={})
    answer = parser.feed(REASONING + FINAL + '{"a": 1}') + parser.end()
    assert answer == [ReasoningDelta("Let me see."), ContentDelta('{"a": 1}')]
