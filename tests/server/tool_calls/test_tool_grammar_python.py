"""Grammars of calls that are written as Python, asked of the library itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.errors import RequestError
from server.tool_calls.formats import TOOL_FORMATS
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.deltas import ToolCallDelta
from tests.support.parsing.format_cases import PYTHON, section
from tests.support.parsing.tool_grammars import (
    accepts,
    grammar_of,
    request,
    tokenizer_with_special,
    tool,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "boolean"},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "d": {"enum": ["x", True, None]},
        "e": {"type": "boolean", "const": False},
    },
    "required": ["b"],
}
TOOL = tool("f", parameters=SCHEMA)
FREE = tool("g")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


def read(name: str, text: str) -> list[Any]:
    """What the parser makes of a text's calls."""
    parser = AnswerParser(TOOL_FORMATS[name], None, tools={"f": SCHEMA, "g": {}})
    found: list[str] = []
    for delta in parser.feed(text) + parser.end():
        assert isinstance(delta, ToolCallDelta), delta
        if delta.id is not None:
            found.append("")
        found[-1] += delta.arguments
    return [json.loads(each) for each in found]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("b=True", {"b": True}),
        ("b=false", {"b": False}),
        ('a=1, b=True, c="x, y", e=False', {"a": 1, "b": True, "c": "x, y", "e": False}),
        ("b=True, d=None", {"b": True, "d": None}),
        ("a=-3,b=False,d=True", {"a": -3, "b": False, "d": True}),
        ('b=True, c=None, d="x"', {"b": True, "c": None, "d": "x"}),
    ],
)
def test_arguments_may_be_spelt_as_python_or_json_and_are_read_again(
    tokenizer: Tokenizer, name: str, written: str, meant: dict[str, Any]
):
    grammar = grammar_of(tokenizer, name, tools=[TOOL], tool_choice="required")
    assert grammar is not None
    text = section(name, f"f({written})")
    assert accepts(tokenizer, grammar, text)
    assert read(name, text) == [meant]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    "written",
    [
        "",
        "a=1",
        "a=1, b=None",
        "b=True, a=1",
        "b=True, d=False",
        "b=True, e=True",
        "b=True,",
        "True",
        "b=True, c=5",
        "a=1 b=True",
        ", b=True",
        "b=True, b=True",
        "b=True, x=1",
    ],
)
def test_arguments_that_the_schema_has_not_cannot_be_said(
    tokenizer: Tokenizer, name: str, written: str
):
    grammar = grammar_of(tokenizer, name, tools=[TOOL], tool_choice="required")
    assert grammar is not None
    assert not accepts(tokenizer, grammar, section(name, f"f({written})"))


@pytest.mark.parametrize("name", PYTHON)
def test_calls_of_one_section_are_several_unless_one_is_asked_for(tokenizer: Tokenizer, name: str):
    text = section(name, "f(b=True)", "f(a=2, b=False)")
    for parallel, fine in ((None, True), (False, False)):
        grammar = grammar_of(
            tokenizer, name, tools=[TOOL], tool_choice="required", parallel_tool_calls=parallel
        )
        assert grammar is not None and accepts(tokenizer, grammar, text) == fine
    assert read(name, text) == [{"b": True}, {"a": 2, "b": False}]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    "written",
    [
        "",
        """a='it\\'s )', b=("x", 1,), c={'k': [True, -1.5e3], "l": None}""",
        'a = [], b = {}, c = "two\nlines"',
    ],
)
def test_a_function_that_is_not_strict_takes_any_python_although_another_is_strict(
    tokenizer: Tokenizer, name: str, written: str
):
    strict = tool("f", parameters=SCHEMA, strict=True)
    grammar = grammar_of(tokenizer, name, tools=[strict, FREE])
    assert grammar is not None
    free = f"g({written})"
    assert accepts(tokenizer, grammar, section(name, free, "f(b=True)"))
    assert not accepts(tokenizer, grammar, section(name, free, "f(b=1)"))
    assert len(read(name, section(name, free, "f(b=True)"))) == 2


def test_lists_in_a_text_are_no_calls(tokenizer: Tokenizer):
    grammar = grammar_of(tokenizer, "pythonic", tools=[tool("f", parameters=SCHEMA, strict=True)])
    assert grammar is not None
    for text in ("[1, 2]", "[f]", "see f(x) and [notes]", "[[f (b=1)]]"):
        assert accepts(tokenizer, grammar, text), text
    for text in ("[f(b=1)]", "[\n f(b=1)]", "so: [f(b=1)]"):
        assert not accepts(tokenizer, grammar, text), text


def test_an_argument_that_python_cannot_name_is_refused_by_its_path(tokenizer: Tokenizer):
    parameters = {"type": "object", "properties": {"x-y": {"type": "string"}}}
    with pytest.raises(RequestError, match="'x-y'") as refused:
        grammar_of(
            tokenizer, "lfm2", tools=[tool("f", parameters=parameters)], tool_choice="required"
        )
    assert refused.value.param == "tools[0].function.parameters.properties"
    assert request(tools=[tool("f", parameters=parameters)]).tools
