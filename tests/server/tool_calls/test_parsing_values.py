"""Literals and plain text become JSON of the type that the schema asks for."""

import pytest

from server.tool_calls.parser.literal import as_json
from server.tool_calls.parser.values import argument_kinds, as_argument

SCHEMA = {
    "type": "object",
    "properties": {
        "plain": {"type": "integer"},
        "listed": {"type": ["string", "null"]},
        "choice": {"enum": ["a", "b", 3]},
        "fixed": {"const": True},
        "either": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "named": {"$ref": "#/$defs/unit"},
        "endless": {"$ref": "#/properties/endless"},
        "missing": {"$ref": "#/$defs/none"},
        "odd": {"type": 5, "anyOf": "x"},
        "anything": {},
    },
    "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}},
}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("plain", {"integer"}),
        ("listed", {"string", "null"}),
        ("choice", {"string", "integer"}),
        ("fixed", {"boolean"}),
        ("either", {"number", "null"}),
        ("named", {"string"}),
        *((name, set()) for name in ("endless", "missing", "odd", "anything", "unknown")),
    ],
)
def test_the_schema_decides_the_type_of_an_argument(name: str, kinds: set[str]):
    assert argument_kinds(SCHEMA, name) == kinds


def test_a_schema_without_properties_says_nothing():
    assert argument_kinds({}, "x") == set()
    assert argument_kinds({"properties": []}, "x") == set()


@pytest.mark.parametrize(
    ("text", "kinds", "json"),
    [
        ("5", "string", '"5"'),
        ("5", "integer", "5"),
        ("5.0", "integer", "5"),
        ("5.5", "integer", "5.5"),
        ("5.0", "number", "5.0"),
        (" 5 ", "number", "5"),
        ("TRUE", "boolean", "true"),
        ("yes", "boolean", '"yes"'),
        ("None", "null", "null"),
        ("null", "string null", "null"),
        ("nullify", "string null", '"nullify"'),
        ("5", "string integer", "5"),
        ("5.5", "string integer", '"5.5"'),
        ('"5"', "string null", '"\\"5\\""'),
        ("[1, 2]", "array", "[1, 2]"),
        ("{'a': (1,)}", "object", '{"a": [1]}'),
        ('{"a": 1', "object", '"{\\"a\\": 1"'),
        ("[1]", "string object", '"[1]"'),
        ("5", "", "5"),
        ('"x"', "", '"x"'),
        ("some words", "", '"some words"'),
        ("NaN", "number", '"NaN"'),
        ("", "integer", '""'),
        ("1e999", "number", "1e999"),
        ("9" * 5000, "integer", '"' + "9" * 5000 + '"'),
    ],
)
def test_text_becomes_a_value_of_its_type(text: str, kinds: str, json: str):
    assert as_argument(text, frozenset(kinds.split())) == json


@pytest.mark.parametrize(
    ("literal", "json"),
    [
        ('{"a": [1, {"b": null}], "c": ""}', '{"a": [1, {"b": null}], "c": ""}'),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ("()", "[]"),
        ("'a\\\nb'", '"ab"'),
        ("{1: 'a', x: 2}", '{"1": "a", "x": 2}'),
        ("[1,]", "[1]"),
        ("[+1, .5, 5., 007, -0, 1E+5]", "[1, 0.5, 5.0, 7, -0, 1E+5]"),
        (r"'\x41\u00e9\U0001F600\d\'" + '"' + "'", '"A\\u00e9😀\\\\d\'\\""'),
        (r'"\x4"', '"\\\\x4"'),
        (r'"\ud800"', r'"\ud800"'),
        (r'"\Uffffffff\U0000d800"', r'"\\Uffffffff\\U0000d800"'),
        ('"a\tb\x00"', '"a\\tb\\u0000"'),
    ],
)
def test_a_literal_becomes_json(literal: str, json: str):
    assert as_json(literal) == json


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[1",
            "[1 2]",
            "{,}",
            "[,]",
            "{1}",
            "{'a' 1}",
            "{'a':}",
            "'",
            "'\\",
            "1 2",
            "[)",
        ),
        *("nil", "1_000", "0x1f", "--1", "1e", ".", "- 1", "f()", '"a" "b"', '{"a": 1}}', "[1,,2]"),
    ],
)
def test_what_is_no_literal_is_none(text: str):
    assert as_json(text) is None
