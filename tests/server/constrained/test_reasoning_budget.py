"""thinking_token_budget: reasoning ends after so many tokens, and the answer goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer

from server.constrained.grammar_text import GrammarLiterals
from server.constrained.grammar_worker import Checker, GrammarCheckArgs
from server.constrained.reasoning_grammar import after_limited_reasoning, in_final_message
from server.constrained.response_format import json_grammar
from server.errors import FieldPath, UnsupportedParameter
from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.grammar import tool_grammar
from tests.support.parsing.tool_grammars import (
    ADDED,
    PARAMETERS,
    accepts,
    literals_of,
    matcher_of,
    request,
    tokenizer_with_special,
    tool,
)
from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import CAN_BE_QUIET, QUESTION, qwen_server

THINK = REASONING_FORMATS["think"]
SEED = REASONING_FORMATS["seed_oss"]
MISTRAL = REASONING_FORMATS["mistral"]
HARMONY = REASONING_FORMATS["harmony"]
WORDS = "the quick brown fox jumps over the lazy dog and so on and on"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


def taken(tokenizer: Tokenizer, grammar: Any, text: str) -> int:
    """How many tokens of a text may be said."""
    matcher = matcher_of(tokenizer, grammar)
    return matcher.try_consume_tokens(tokenizer.encode(text, add_special_tokens=False).ids)


# Of this vocabulary </think> is a special token and [/THINK] another one; </seed:think> is text.
each_end = pytest.mark.parametrize(
    "reasoning", [THINK, MISTRAL, SEED], ids=["special", "added", "text"]
)


@each_end
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_has_so_many_tokens_and_no_more(
    tokenizer: Tokenizer, reasoning: Any, budget: int
):
    literals = literals_of(tokenizer)
    begun = after_limited_reasoning(None, reasoning, literals, budget, begun=True)
    # A word of text may go on in the next token: then it counts from there.
    least = max(0, budget - 2) if reasoning is SEED else budget
    assert least <= taken(tokenizer, begun, WORDS) <= budget
    reasoning_text = tokenizer.decode(tokenizer.encode(WORDS, add_special_tokens=False).ids[:least])
    answer = f"{reasoning_text}{reasoning.closes[0]}\n\nYes: {WORDS} <|tool_call|> {WORDS}"
    assert accepts(tokenizer, begun, answer)
    free = after_limited_reasoning(None, reasoning, literals, budget, begun=False)
    assert accepts(tokenizer, free, reasoning.opens[0] + answer)


@each_end
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_such_a_grammar_passes_the_check(tokenizer: Tokenizer, reasoning: Any, budget: int):
    literals = literals_of(tokenizer)
    special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    special = {id: word for id, word in special.items() if word not in ADDED}
    checker = Checker(GrammarCheckArgs(tokenizer.get_vocab_size(), special))
    for begun in (False, True):
        grammar = after_limited_reasoning(None, reasoning, literals, budget, begun=begun)
        assert checker.check(grammar).error is None


@each_end
def test_reasoning_may_end_by_itself_and_the_answer_is_not_limited(
    tokenizer: Tokenizer, reasoning: Any
):
    grammar = after_limited_reasoning(None, reasoning, literals_of(tokenizer), 30, begun=True)
    end = reasoning.closes[0]
    for reasoning_text in ("", "a < b", "</b> </", f"{end[:4]}{end[:-1]}<", "x" + end[:3]):
        assert accepts(tokenizer, grammar, f"{reasoning_text}{end}{WORDS} {WORDS} {end} {WORDS}"), (
            reasoning_text
        )
    assert not accepts(tokenizer, grammar, "the quick"), "an answer cannot end within its reasoning"


@each_end
def test_an_answer_without_reasoning_is_free_but_cannot_hide_it(
    tokenizer: Tokenizer, reasoning: Any
):
    grammar = after_limited_reasoning(None, reasoning, literals_of(tokenizer), 2, begun=False)
    for text in ("", WORDS, f"{WORDS}[ARGS]{WORDS}", "<|tool_call|>x"):
        assert accepts(tokenizer, grammar, text), text
    for gap in ("", "\n"):
        assert not accepts(tokenizer, grammar, f"{gap}{reasoning.opens[0]}{WORDS}", whole=False)


def test_the_form_of_the_answer_follows_the_reasoning(tokenizer: Tokenizer):
    requested = json_grammar({"type": "object", "required": ["a"]}, FieldPath("response_format"))
    grammar = after_limited_reasoning(requested, SEED, literals_of(tokenizer), 2, begun=True)
    end = SEED.closes[0]
    assert accepts(tokenizer, grammar, f'a{end}\n{{"a": 1}}')
    assert not accepts(tokenizer, grammar, f'a{end}\n{{"b": 1}}')
    assert not accepts(tokenizer, grammar, f"{WORDS}{end}", whole=False)


HEAD = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_harmonys_reasoning_is_one_message_of_so_many_tokens(tokenizer: Tokenizer, budget: int):
    literals = literals_of(tokenizer)
    begun = after_limited_reasoning(None, HARMONY, literals, budget, begun=True)
    assert taken(tokenizer, begun, WORDS) == budget
    free = after_limited_reasoning(None, HARMONY, literals, budget, begun=False)
    head = len(tokenizer.encode(HEAD, add_special_tokens=False).ids)
    assert taken(tokenizer, free, HEAD + WORDS) == head + budget
    reasoning_text = tokenizer.decode(
        tokenizer.encode(WORDS, add_special_tokens=False).ids[:budget]
    )
    for rest in (FINAL + f"{WORDS} {WORDS}", CALL, " to=functions.weather" + CALL):
        assert accepts(tokenizer, begun, reasoning_text + NEXT + rest)
        assert accepts(tokenizer, free, HEAD + reasoning_text + NEXT + rest)
        assert accepts(tokenizer, free, rest)
        again = CALL + NEXT + HEAD
        assert not accepts(tokenizer, free, again, whole=False), "reasoning a second time"


@pytest.mark.parametrize("strict", [False, True])
def test_harmonys_preambles_and_calls_follow_the_reasoning(tokenizer: Tokenizer, strict: bool):
    preamble = f"<|channel|>commentary<|message|>I will look.{NEXT}"
    tools = [tool("weather", parameters=PARAMETERS, strict=strict)]
    format, literals = TOOL_FORMATS["harmony"], literals_of(tokenizer)
    calls = tool_grammar(request(tools=tools), None, format, "", literals, reasoning_between=False)
    assert (calls is None) == (not strict)
    grammar = after_limited_reasoning(calls, HARMONY, literals, 3, begun=False)
    for before in ("", f"{HEAD}Hm.{NEXT}"):
        for text in (CALL, preamble + CALL, preamble + FINAL + WORDS):
            assert accepts(tokenizer, grammar, before + text), before + text
        for text in (f"{preamble}{HEAD}", f"{HEAD}{WORDS}"):
            assert not accepts(tokenizer, grammar, before + text, whole=False), before + text
    assert accepts(tokenizer, grammar, CALL.replace('"Rome"', "1")) == (not strict)


def test_the_form_of_harmonys_final_message_follows_the_reasoning(tokenizer: Tokenizer):
    literals = literals_of(tokenizer)
    schema = {"type": "object", "required": ["a"]}
    requested = in_final_message(json_grammar(schema, FieldPath("response_format")), literals)
    format = TOOL_FORMATS["harmony"]
    calls = tool_grammar(request(), requested, format, "", literals, reasoning_between=False)
    for answer, may_call in ((requested, False), (calls, True)):
        grammar = after_limited_reasoning(answer, HARMONY, literals, 3, begun=False)
        for before in ("", f"{HEAD}Hm.{NEXT}"):
            assert accepts(tokenizer, grammar, f'{before}{FINAL}{{"a": 1}}')
            assert not accepts(tokenizer, grammar, f'{before}{FINAL}{{"b": 1}}')
            assert accepts(tokenizer, grammar, before + CALL) == may_call
            assert not accepts(tokenizer, grammar, before + CALL.replace('"Rome"', "1"))


@pytest.mark.parametrize("name", ["harmony", "granite"])
def test_formats_whose_end_is_no_one_token_are_refused_by_name(name: str):
    with pytest.raises(UnsupportedParameter, match=name) as refused:
        after_limited_reasoning(None, REASONING_FORMATS[name], GrammarLiterals({}), 5, begun=True)
    assert refused.value.param == "thinking_token_budget"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory, CAN_BE_QUIET) as server:
        yield server


@pytest.mark.parametrize(
    ("more", "limited"),
    [
        ({"thinking_token_budget": 5}, True),
        ({"thinking_token_budget": 0}, True),
        ({"thinking_token_budget": -1}, False),
        ({"thinking_token_budget": None}, False),
        ({"thinking_token_budget": 50, "max_tokens": 50}, False),  # comes after the end
        ({"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_a_budget_becomes_a_grammar_where_it_can_be_reached(
    fake: FakeServer, more: dict[str, Any], limited: bool
):
    fake.say("<think>Hm.</think>Yes.")
    body = {"model": "fake", "messages": QUESTION, **more}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert ("max_tokens=" in fake.engine.requests[-1].params.grammar) == limited
