"""response_format and structured_outputs: what reaches the engine, and what is refused and why."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer

from runtime.grammar.matchers import Matchers, Vocabulary
from runtime.grammar.messages import Compile, Compiled
from server.constrained.grammar_text import Grammar
from server.constrained.grammar_worker import Checker, GrammarCheckArgs
from server.constrained.response_format import json_grammar
from tests.support.server.fake_engine import VOCAB, FakeServer, write_tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"model": "fake", "prompt": "Hello"},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SLOW = "start: A\nA: /(.*a.{17})/ & /(.*b.{16})/ & ~/(.*c.{15})/"  # some 12 s


class Judge:
    """Which texts a grammar takes, by the code that the engine uses."""

    def __init__(self, folder: Path) -> None:
        file = write_tokenizer(folder) / "tokenizer.json"
        self._matchers = Matchers(Vocabulary(str(file), VOCAB))
        self._tokenizer = Tokenizer.from_file(str(file))
        self._key = 0

    def takes(self, grammar: str, text: str) -> bool:
        self._key += 1
        compiled = self._matchers.compile(Compile(self._key, grammar, (0,)))
        assert isinstance(compiled, Compiled) and compiled.error is None, compiled.error
        mask, ended = compiled.mask, False
        for token in self._tokenizer.encode(text).ids:
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            news = self._matchers.advance([(self._key, token)])
            assert not news.errors
            mask, ended = news.masks.get(self._key, bytes(len(mask))), self._key in news.ended
        return bool(mask[0] & 1) or ended


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("judge"))


def grammar_of(fake: FakeServer, http: httpx.Client, route: str, **fields: object) -> str:
    fake.engine.requests.clear()
    answer = http.post(route, json=BASE[route] | fields)
    assert answer.status_code == 200, answer.text
    (request,) = fake.engine.requests
    return request.params.grammar


def schema_format(schema: object, **fields: object) -> dict[str, Any]:
    inner = {"name": "thing", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def structured(**fields: object) -> dict[str, Any]:
    return {"structured_outputs": fields}


def nested(**more: object) -> dict[str, Any]:
    """A schema with objects in every place that a schema may stand in, none of them closed."""
    inner: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    properties = {
        "direct": inner,
        "listed": {"type": "array", "items": inner},
        "first": {"type": "array", "prefixItems": [inner]},
        "any": {"anyOf": [inner, {"type": "null"}]},
        "named": {"$ref": "#/$defs/inner"},
        "all": {"allOf": [{"$ref": "#/$defs/inner"}]},
        "mapped": {"type": "object", "additionalProperties": inner},
        "matched": {"type": "object", "patternProperties": {"^k": inner}},
        "free": {"type": "object"},
    }
    return {"type": "object", "properties": properties, "$defs": {"inner": inner}, **more}


def in_each_place(value: str) -> list[str]:
    """Texts of nested() with this object at one place each."""
    places = ["direct", "any", "named", "all"]
    texts = [f'{{"{place}": {value}}}' for place in places]
    texts += [f'{{"{place}": [{value}]}}' for place in ("listed", "first")]
    return [*texts, f'{{"mapped": {{"x": {value}}}}}', f'{{"matched": {{"k": {value}}}}}']


JUST_A, MORE = in_each_place('{"a": 1}'), [*in_each_place('{"a": 1, "b": 2}'), '{"more": 1}']
FREE = ['{"any": null}', '{"free": {"b": 1}}', '{"mapped": {"x": {}, "y": {}}}']
JOINED: dict[str, Any] = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}

ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "hello", "1"]),
    (schema_format(PERSON, strict=True), ['{"name": "x", "age": 3}'], ["{}", '{"name":1,"age":3}']),
    (schema_format(nested(), strict=True), JUST_A + FREE, MORE),
    (schema_format(nested(), strict=False), JUST_A + FREE + MORE, ['{"direct": 1}']),
    (schema_format(nested()), JUST_A + FREE + MORE, ['{"direct": 1}']),
    (schema_format(nested(additionalProperties=True), strict=True), JUST_A + FREE + MORE, ["[]"]),
    (schema_format({"enum": [{"properties": {"a": 1}}]}, strict=True),
     ['{"properties":{"a":1}}'], ['{"properties":{"a":1},"additionalProperties":false}']),
    (schema_format(JOINED), ['{"a": 1, "b": 2}'], ["x"]),
    (schema_format(PERSON, strict=False), ['{"name":"x","age":3}'], ['{"age":3}']),
    (schema_format(PERSON), ['{\n  "name": "x",\n  "age": 3\n}'], ['{"name":"x","age":3} ']),
    (structured(json=PERSON), ['{"name":"x","age":3}'], ["{}"]),
    (structured(json=json.dumps(PERSON)), ['{"name":"x","age":3}'], ["{}"]),
    (structured(json_object=True), ["{}"], ["[]"]),
    (structured(json={}), ["1", "{}", '"x"'], ["hello"]),
    (structured(json=PERSON, disable_any_whitespace=True), ['{"name":"x","age":3}'],
     ['{"name": "x", "age": 3}']),
    (structured(json=PERSON, whitespace_pattern="[ ]?"), ['{"name": "x", "age": 3}'],
     ['{"name":  "x","age":3}']),
    (structured(json={"type": "object", "properties": {"a": {"type": "integer"}}},
                disable_additional_properties=True), ['{"a": 1}'], ['{"b": 1}']),
    (structured(json={"type": "array", "uniqueItems": False, "items": {"const": {"not": 1}}}),
     ['[{"not": 1}]'], ["[1]"]),
    (structured(json={"properties": {"not": {"type": "null"}}, "required": ["not"],
                      "type": "object"}), ['{"not": null}'], ['{"not": 1}']),
    (structured(regex="^a/b{2}\n$"), ["a/bb\n"], ["a/b", "^a/bb"]),
    (structured(regex=r"\d\/\\"), ["1/\\"], ["1/", "x/\\"]),
    (structured(choice=["yes", "no/never", 'a "b" \\ \n|.*']), ["yes", 'a "b" \\ \n|.*'],
     ["yesno", "maybe", "x"]),
    (structured(grammar='start: "a" b\nb: /[0-9]+/'), ["a12"], ["b1", "a"]),
    (structured(grammar='root ::= "a" b\nb ::= [0-9]+'), ["a12"], ["b1", "a"]),
    (structured(structural_tag={"triggers": ["<f"], "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]}),
     ["anything", "x <f=a>12</f> y", "<f=a>1</f><f=a>2</f>"], ["<f=b>1</f>", "<f=a>x</f>"]),
    (structured(structural_tag=json.dumps({"triggers": ["[T]", "<"], "structures": [
        {"begin": "[T]f", "schema": PERSON, "end": ""},
        {"begin": "<g/>", "schema": {"enum": ["a", "b"]}, "end": "!"}]})),
     ['so [T]f{"name": "x", "age": 1} and <g/>"a"! so'], ['<g/>"c"!', "[T]g", "<h", "[T]f{}"]),
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: json.dumps(row[0])[:60])
def test_the_engine_gets_a_grammar_that_takes_what_was_asked_for(
    fake: FakeServer, http: httpx.Client, judge: Judge, route: str, row: tuple[Any, ...]
) -> None:
    fields, good, bad = row
    grammar = grammar_of(fake, http, route, **fields)
    assert [text for text in good if not judge.takes(grammar, text)] == []
    assert [text for text in bad if judge.takes(grammar, text)] == []


@pytest.mark.parametrize("wanted", [None, {"type": "text"}])
def test_any_text_needs_no_grammar(fake: FakeServer, http: httpx.Client, wanted: object) -> None:
    assert grammar_of(fake, http, CHAT, response_format=wanted) == ""


def test_white_space_is_a_space_or_an_indentation(judge: Judge) -> None:
    (grammar,) = json_grammar({"type": "object"}, "x").grammars
    text = json.dumps({"grammars": [grammar]})
    value = {"a": [1, {"b": []}], "c": "  \t "}
    good = [json.dumps(value, indent=indent) for indent in (None, 0, 2, 4, "\t")]
    good += [json.dumps(value, separators=(",", ":")), '{ "a" : 1 }', '{"a":\r\n1}']
    bad = ['{"a":  1}', '{"a":\n\n1}', '{"a":\t1}', '{"a":\n' + " " * 33 + "1}", " {}", "{} "]
    assert [each for each in good if not judge.takes(text, each)] == []
    assert [each for each in bad if judge.takes(text, each)] == []


SCHEMA = "unsupported_schema"
GRAMMAR = "invalid_grammar"
VALUE = "invalid_value"
TYPE = "invalid_type"
MISSING = "missing_required_parameter"
UNSUPPORTED = "unsupported_parameter"
RF = "response_format"
RJ = "response_format.json_schema"
RS = "response_format.json_schema.schema"
SO = "structured_outputs"


def holding(**properties: object) -> dict[str, Any]:
    return schema_format({"type": "object", "properties": properties})


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
    (schema_format({"propertyNames": {"pattern": "a"}}), SCHEMA, f"{RS}.propertyNames",
     "patternProperties"),
    (schema_format({"dependentRequired": {"a": ["b"]}}), SCHEMA, f"{RS}.dependentRequired", "any"),
    (schema_format({"unevaluatedProperties": False}), SCHEMA, f"{RS}.unevaluatedProperties",
     "additionalProperties"),
    (schema_format({"x-guidance": {"lenient": True}}), SCHEMA, f"{RS}.x-guidance", "options"),
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
    (schema_format({"oneOf": [{"type": "string"}, {"minLength": 3}]}), SCHEMA, RS, "oneOf"),
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
    answer = http.post(CHAT, json=BASE[CHAT] | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["code"], error["param"]) == (code, param), error
    assert words in error["message"], error
    assert len(error["message"]) < 600
    assert fake.engine.requests == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
         "required": [f"p{i}" for i in range(5000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(480)},
         "patternProperties": {"^x-[a-z]+$": {}, "^y": {}}},
    ],
    ids=["5000 properties", "480 optional ones"],
)  # fmt: skip
def test_the_largest_schemas_are_taken(
    fake: FakeServer, http: httpx.Client, judge: Judge, schema: dict[str, Any]
) -> None:
    grammar = grammar_of(fake, http, CHAT, **schema_format(schema))
    assert not judge.takes(grammar, "hello")


def test_a_deep_schema_is_refused_with_the_place(http: httpx.Client) -> None:
    schema: dict[str, Any] = {}
    for _ in range(45):
        schema = {"items": schema}
    answer = http.post(CHAT, json=BASE[CHAT] | schema_format(schema))
    error = answer.json()["error"]
    assert error["param"] == RS + ".items" * 40
    assert "deeper than 40 levels" in error["message"]


def test_a_grammar_that_takes_long_holds_nobody_up(fake: FakeServer, http: httpx.Client) -> None:
    fake.say("Hi.")
    slow: list[int] = []

    def ask_slowly() -> None:
        fields = structured(grammar=SLOW + "\n// another one")
        slow.append(httpx.post(fake.url + CHAT, json=BASE[CHAT] | fields, timeout=60).status_code)

    thread = threading.Thread(target=ask_slowly)
    thread.start()
    answers = [http.post(CHAT, json=BASE[CHAT]) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert slow == [], "it was not slow"
    thread.join()
    assert slow == [400]


def test_a_grammar_is_tried_once(fake: FakeServer, http: httpx.Client) -> None:
    first = grammar_of(fake, http, CHAT, **structured(regex="once"))
    assert first == grammar_of(fake, http, TEXT, **structured(regex="once"))


def test_every_copy_gets_the_grammar(fake: FakeServer, http: httpx.Client) -> None:
    fake.engine.requests.clear()
    http.post(CHAT, json=BASE[CHAT] | structured(choice=["a", "b"]) | {"n": 3})
    assert len({request.params.grammar for request in fake.engine.requests}) == 1
    assert len(fake.engine.requests) == 3


def test_gbnf_is_translated_where_it_stands_inside_another_grammar() -> None:
    checker = Checker(GrammarCheckArgs(VOCAB, {}))
    outer = {"lark_grammar": 'start: "x::=y " @answer'}
    inner = {"name": "answer", "lark_grammar": 'root ::= "a" b\nb ::= [0-9]+'}
    verdict = checker.check(Grammar([outer, inner], ebnf=True))
    assert verdict.error is None
    assert [each["name"] for each in json.loads(verdict.grammar)["grammars"][1:]] == ["answer"]
