"""response_format and structured_outputs: the path, code and words of each refusal."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer
from tests.support.server.malformed_requests import (
    BASE,
    CHAT,
    MISSING,
    TYPE,
    UNSUPPORTED,
    VALUE,
    check,
)

SLOW = "start: A\nA: /(.*a.{17})/ & /(.*b.{16})/ & ~/(.*c.{15})/"  # some 12 s


def schema_format(schema: object, **fields: object) -> dict[str, Any]:
    inner = {"name": "thing", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def structured(**fields: object) -> dict[str, Any]:
    return {"structured_outputs": fields}


JOINED: dict[str, Any] = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}

SCHEMA = "unsupported_schema"
GRAMMAR = "invalid_grammar"
RF = "response_format"
RJ = "response_format.json_schema"
RS = "response_format.json_schema.schema"
SO = "structured_outputs"


def holding(**properties: object) -> dict[str, Any]:
    return strict_format({"type": "object", "properties": properties})


def strict_format(schema: object) -> dict[str, Any]:
    return schema_format(schema, strict=True)


# fields, code, param, words of the message
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({RF: "json"}, TYPE, RF, "an object"),
    ({RF: {}}, MISSING, f"{RF}.type", "required"),
    ({RF: {"type": "yaml"}}, VALUE, f"{RF}.type", "'json_object'"),
    ({RF: {"type": "json_schema"}}, MISSING, RJ, "required"),
    ({RF: {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, VALUE, RJ,
     "does nothing"),
    ({RF: {"type": "json_schema", "json_schema": {"schema": {}}}}, MISSING, f"{RJ}.name", "add"),
    ({RF: {"type": "json_schema", "json_schema": {"name": "a"}}}, MISSING, RS, "required"),
    (schema_format([1]), TYPE, RS, "an object"),
    (schema_format({}, strict="yes"), TYPE, f"{RJ}.strict", "true or false"),
    (schema_format({}, mode=1), "unknown_parameter", f"{RJ}.mode", "not a parameter"),
    (holding(a={"not": {"type": "string"}}), SCHEMA, f"{RS}.properties.a.not", "allowed instead"),
    (holding(a={"type": "array", "uniqueItems": True}), SCHEMA,
     f"{RS}.properties.a.uniqueItems", "yourself"),
    (holding(a={"items": {"if": {}}}), SCHEMA, f"{RS}.properties.a.items.if", "anyOf"),
    (holding(a={"type": "string", "nullable": True}), SCHEMA,
     f"{RS}.properties.a.nullable", '"null"'),
    (holding(a={"max_length": 3}), SCHEMA, f"{RS}.properties.a.max_length", "`maxLength`"),
    (holding(a={"enums": [1]}), SCHEMA, f"{RS}.properties.a.enums", "`enum`"),
    (strict_format({"propertyNames": {"pattern": "a"}}), SCHEMA, f"{RS}.propertyNames",
     "patternProperties with additionalProperties false, or leave `strict` out"),
    (strict_format({"dependentRequired": {"a": ["b"]}}), SCHEMA, f"{RS}.dependentRequired", "any"),
    (strict_format({"unevaluatedProperties": False}), SCHEMA, f"{RS}.unevaluatedProperties",
     "additionalProperties"),
    (strict_format({"x-guidance": {"lenient": True}}), SCHEMA, f"{RS}.x-guidance", "options"),
    (holding(a={"type": "text"}), SCHEMA, f"{RS}.properties.a", "Invalid type: text"),
    (holding(a={"type": "string", "format": "colour"}), SCHEMA, f"{RS}.properties.a", "colour"),
    (holding(a={"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}), SCHEMA,
     f"{RS}.properties.a.anyOf[1]", "unclosed group"),
    (holding(a={"type": "string", "pattern": "(?=b)a"}), SCHEMA, f"{RS}.properties.a",
     "look-around"),
    (holding(a={"$ref": "#/$defs/missing"}), SCHEMA, f"{RS}.properties.a", "does not exist"),
    (holding(a={"$ref": "https://example.com/s"}), SCHEMA, f"{RS}.properties.a", "example.com"),
    (schema_format({"$defs": {"x": {"minimum": "low"}}, "$ref": "#/$defs/x"}), SCHEMA,
     f"{RS}.$defs.x", "minimum"),
    (schema_format({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), SCHEMA,
     f"{RS}.$defs.a", "no text"),
    (schema_format({"type": "object", "required": ["a"],
                    "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}}), SCHEMA,
     f"{RS}.properties.a", "minimum (5) is greater"),
    (strict_format({"oneOf": [{"type": "string"}, {"minLength": 3}]}), SCHEMA, RS, "oneOf"),
    (schema_format({"enum": []}), SCHEMA, RS, "empty"),
    (schema_format({"type": "object", "properties": {f"p{i}": {} for i in range(4999)}}), SCHEMA,
     RS, "has 4999 optional properties one after the other: at most 480"),
    (holding(a={"properties": {f"p{i}": {} for i in range(1000)}, "required": ["p400"]}), SCHEMA,
     f"{RS}.properties.a", "has 599 optional properties"),
    (schema_format({"allOf": [{"properties": {f"p{i}": {} for i in range(1000)}}]}), SCHEMA,
     f"{RS}.allOf[0]", "has 1000 optional properties"),
    (schema_format({"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [
        {"type": "string"}] + [
        {"type": "object", "properties": {f"{n}p{i}": {} for i in range(300)}} for n in range(3)
    ]}}}), SCHEMA, f"{RS}.properties.a", "too many things may come next"),
    (schema_format({"anyOf": [{"type": "string"}] + [
        {"type": "object", "properties": {f"{n}p{i}": {} for i in range(300)}} for n in range(3)
    ]}), SCHEMA, RS, "too many things may come next"),
    (schema_format({"type": "object", "properties": {f"p{i}": {} for i in range(5001)}}), VALUE,
     RS, "at most 5000 properties"),
    (schema_format({"enum": list(range(10_001))}), VALUE, RS, "10000 enum values"),
    (schema_format({"description": "x" * 262_144}), VALUE, RS, "at most 262144"),
    (schema_format({"type": "string", "pattern": "a" * 8193}), VALUE, f"{RS}.pattern", "8192"),
    (schema_format({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
                    | {"d3000": {}}, "$ref": "#/$defs/d0"}), SCHEMA, RS, "too complex"),
    (schema_format(JOINED, strict=True), SCHEMA, f"{RS}.allOf", "into one object"),
    (schema_format({"$defs": {"base": JOINED["allOf"][0]}, "properties": {"x": {
        "properties": {"b": {}}, "allOf": [{"$ref": "#/$defs/base"}]}}}, strict=True), SCHEMA,
     f"{RS}.properties.x.allOf", "into one object"),
    (schema_format({"$defs": {"base": JOINED["allOf"][0]}, "$ref": "#/$defs/base",
                    "properties": {}}, strict=True), SCHEMA, f"{RS}.$ref", "into one object"),
    (schema_format({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {}}]},
                   strict=True), SCHEMA, f"{RS}.anyOf", "set `additionalProperties`"),
    ({SO: {}}, VALUE, SO, "exactly one"),
    (structured(json={}, regex="a"), VALUE, SO, "`json` and `regex`"),
    (structured(regex="a", choice=["b"]), VALUE, SO, "`regex` and `choice`"),
    (structured(json_object=False), VALUE, SO, "has none"),
    (structured(json="{"), VALUE, f"{SO}.json", "at least 2"),
    (structured(json="{]"), VALUE, f"{SO}.json", "not valid JSON"),
    (structured(json="[1]"), VALUE, f"{SO}.json", "must be an object"),
    (structured(json=7), TYPE, f"{SO}.json", "a JSON Schema"),
    (structured(regex=""), VALUE, f"{SO}.regex", "at least 1"),
    (structured(regex="a" * 8193), VALUE, f"{SO}.regex", "at most 8192"),
    (structured(regex="a("), GRAMMAR, f"{SO}.regex",
     "cannot be used: a regular expression is wrong: unclosed group"),
    (structured(regex="(" * 300 + "a" + ")" * 300), GRAMMAR, f"{SO}.regex",
     "nested parentheses/brackets (250)"),
    (structured(choice=[]), VALUE, f"{SO}.choice", "at least 1"),
    (structured(choice=["a", ""]), VALUE, f"{SO}.choice[1]", "at least 1"),
    (structured(choice=["a", 3]), TYPE, f"{SO}.choice[1]", "a string"),
    (structured(choice=["a"] * 4097), VALUE, f"{SO}.choice", "at most 4096"),
    (structured(choice=["a" * 9999] * 30), VALUE, f"{SO}.choice", "262144"),
    (structured(grammar="hello"), GRAMMAR, f"{SO}.grammar", "Expected token"),
    (structured(grammar='start: "a" | other'), GRAMMAR, f"{SO}.grammar", 'unknown name: "other"'),
    (structured(grammar='root ::= ("a"'), GRAMMAR, f"{SO}.grammar", "GBNF"),
    (structured(grammar="start: <|nobody|>"), GRAMMAR, f"{SO}.grammar", "special token"),
    (structured(grammar="start: " + "(" * 900 + '"a"' + ")" * 900), GRAMMAR, f"{SO}.grammar",
     "nested"),
    (structured(grammar=SLOW), GRAMMAR, f"{SO}.grammar", "longer than 2 s"),
    (structured(grammar="start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(4000))
                + 'R4000: "a"'), GRAMMAR, f"{SO}.grammar", "too complex"),
    (structured(grammar="x" * 65_537), VALUE, f"{SO}.grammar", "at most 65536"),
    (structured(structural_tag={"structures": []}), VALUE, f"{SO}.structural_tag", "triggers"),
    (structured(structural_tag={"structures": [{"begin": "<f>"}], "triggers": ["<f"]}), VALUE,
     f"{SO}.structural_tag.structures[0]", "`end`"),
    (structured(structural_tag={"structures": [{"begin": "<g>", "schema": {}, "end": ""}],
                                "triggers": ["<f"]}), VALUE,
     f"{SO}.structural_tag.structures[0].begin", "starts with none"),
    (structured(structural_tag={"structures": [{"begin": "<f>", "end": "", "schema":
     {"title": "x" * 200_000}}] * 6, "triggers": ["<f"]}), SCHEMA,
     f"{SO}.structural_tag.structures", "fewer or smaller"),
    (structured(structural_tag={"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}],
                                "triggers": ["<f"]}), SCHEMA,
     f"{SO}.structural_tag.structures[0].schema.not", "cannot be enforced"),
    (structured(json_object=True, whitespace_pattern="("), VALUE, f"{SO}.whitespace_pattern",
     "regular expression"),
    (structured(json_object=True, whitespace_pattern=" ", disable_any_whitespace=True), VALUE,
     f"{SO}.whitespace_pattern", "exclude each other"),
    (structured(regex="a", disable_any_whitespace=True), VALUE, f"{SO}.disable_any_whitespace",
     "about JSON"),
    (structured(json_object=True, disable_additional_properties=True), VALUE,
     f"{SO}.disable_additional_properties", "`json`"),
    (structured(regx="a"), "unknown_parameter", f"{SO}.regx", "not a parameter"),
    (structured(regex="a") | {RF: {"type": "json_object"}}, VALUE, SO, "exclude each other"),
    (structured(regex="a") | {"allowed_token_ids": [1]}, UNSUPPORTED, "allowed_token_ids", "form"),
    ({"guided_regex": "a"}, UNSUPPORTED, "guided_regex", 'structured_outputs`: {"regex"'),
    ({"guided_choice": ["a"]}, UNSUPPORTED, "guided_choice", "structured_outputs"),
    ({"guided_grammar": "a"}, UNSUPPORTED, "guided_grammar", "structured_outputs"),
    ({"guided_json": {}}, UNSUPPORTED, "guided_json", "structured_outputs"),
    ({"ebnf": "a"}, UNSUPPORTED, "ebnf", "structured_outputs"),
]  # fmt: skip


def named(row: tuple[Any, ...]) -> str:
    return f"{row[2]}-{row[3]}"[-60:]


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_what_cannot_be_enforced_is_refused_by_its_path(
    fake: FakeServer, http: httpx.Client, row: tuple[Any, ...]
) -> None:
    fields, code, param, words = row
    fake.engine.requests.clear()
    check(http.post(CHAT, json=BASE[CHAT] | fields), 400, code, param, words)
    assert fake.engine.requests == []


def test_a_deep_schema_is_refused_with_its_path(http: httpx.Client) -> None:
    schema: dict[str, Any] = {}
    for _ in range(45):
        schema = {"items": schema}
    answer = http.post(CHAT, json=BASE[CHAT] | schema_format(schema))
    check(answer, 400, VALUE, RS + ".items" * 40, "deeper than 40 levels")
