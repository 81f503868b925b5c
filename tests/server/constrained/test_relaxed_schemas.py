"""Schemas without `strict`: what no grammar can express is left out, all else is enforced."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError
from tokenizers import Tokenizer

from server.constrained.response_format import json_grammar
from server.constrained.strict_schema import relaxed_schema
from server.errors import FieldPath, RequestError
from tests.support.parsing.format_cases import call
from tests.support.parsing.tool_grammars import (
    accepts,
    grammar_of,
    tokenizer_with_special,
    tool,
)
from tests.support.server.fake_engine import FakeServer

LOOK = r"^(?!\.)[a-z.]+$"
# A schema of one property `a`, a value that it still takes, and one that it does not.
SCHEMAS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "string", "not": {"const": "b"}}, '"b"', "1"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", '["x"]'),
    ({"type": "array", "contains": {"type": "string"}, "maxItems": 1}, "[1]", "[1, 2]"),
    ({"type": "object", "propertyNames": {"pattern": "^b"}}, '{"c": 1}', "1"),
    ({"type": "string", "nullable": True}, '"x"', "1"),
    ({"type": "string", "format": "uri-reference"}, '"x"', "1"),
    ({"type": "integer", "format": "int32"}, "1", '"x"'),
    ({"type": "string", "pattern": LOOK}, '".b"', "1"),
    ({"type": "string", "pattern": r"(a)\1"}, '"b"', "1"),
    ({"type": "string", "pattern": r"\bb\b"}, '"c"', "1"),
    ({"type": "string", "pattern": r"^\\1\(?=$"}, r'"\\1(="', r'"\\2'),
    (
        {"type": "object", "patternProperties": {"^(?!x)": False, "^b": {"type": "string"}}},
        '{"c": 1}',
        '{"b": 1',
    ),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, '"abcd"', "1"),
    (
        {"items": {"if": {"type": "string"}, "then": {"minLength": 2}}, "type": "array"},
        '["b"]',
        "1",
    ),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


def holding(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}


def ids(row: tuple[dict[str, Any], str, str]) -> str:
    return ",".join(row[0])


@pytest.mark.parametrize("row", SCHEMAS, ids=ids)
def test_what_can_be_enforced_is(tokenizer: Tokenizer, row: tuple[dict[str, Any], str, str]):
    value, taken, refused = row
    path = FieldPath("response_format")
    grammar = json_grammar(relaxed_schema(holding(value), path), path)
    assert accepts(tokenizer, grammar, f'{{"a": {taken}}}')
    assert not accepts(tokenizer, grammar, f'{{"a": {refused}}}', whole=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("row", SCHEMAS, ids=ids)
def test_a_function_with_such_a_schema_can_be_called(
    tokenizer: Tokenizer, name: str, row: tuple[dict[str, Any], str, str]
):
    value, taken, _ = row
    tools = [tool("f", parameters=holding(value))]
    grammar = grammar_of(tokenizer, name, tools=tools, tool_choice="required")
    assert accepts(tokenizer, grammar, call(name, "f", f'{{"a": {taken}}}'))


def test_a_keyword_that_looks_misspelt_is_refused_all_the_same():
    with pytest.raises(RequestError, match="did you mean `maxLength`"):
        relaxed_schema(holding({"max_length": 3}), FieldPath("response_format"))


def test_strict_decides_whether_a_keyword_may_be_left_out(fake: FakeServer):
    form = {"name": "a", "schema": holding(SCHEMAS[0][0])}
    ask: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    for strict in (None, False):
        asked: Any = {"type": "json_schema", "json_schema": form | {"strict": strict}}
        assert fake.client().chat.completions.create(**ask, response_format=asked).choices
        assert '"not"' not in fake.engine.requests[-1].params.grammar
    asked = {"type": "json_schema", "json_schema": form | {"strict": True}}
    with pytest.raises(BadRequestError, match="or leave `strict` out") as refused:
        fake.client().chat.completions.create(**ask, response_format=asked)
    assert refused.value.param == "response_format.json_schema.schema.properties.a.not"
