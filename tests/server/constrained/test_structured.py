"""response_format and structured_outputs: the grammar that reaches the engine."""

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
from server.errors import FieldPath
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
            step = self._matchers.advance([(self._key, [token])])
            assert not step.errors
            mask, ended = step.masks.get(self._key, bytes(len(mask))), self._key in step.ended
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


@pytest.mark.parametrize("requested", [None, {"type": "text"}])
def test_any_text_needs_no_grammar(fake: FakeServer, http: httpx.Client, requested: object) -> None:
    assert grammar_of(fake, http, CHAT, response_format=requested) == ""


def test_white_space_is_a_space_or_an_indentation(judge: Judge) -> None:
    (grammar,) = json_grammar({"type": "object"}, FieldPath("x")).grammars
    text = json.dumps({"grammars": [grammar]})
    value = {"a": [1, {"b": []}], "c": "  \t "}
    good = [json.dumps(value, indent=indent) for indent in (None, 0, 2, 4, "\t")]
    good += [json.dumps(value, separators=(",", ":")), '{ "a" : 1 }', '{"a":\r\n1}']
    bad = ['{"a":  1}', '{"a":\n\n1}', '{"a":\t1}', '{"a":\n' + " " * 33 + "1}", " {}", "{} "]
    assert [each for each in good if not judge.takes(text, each)] == []
    assert [each for each in bad if judge.takes(text, each)] == []


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
def test_the_largest_schemas_are_accepted(
    fake: FakeServer, http: httpx.Client, judge: Judge, schema: dict[str, Any]
) -> None:
    grammar = grammar_of(fake, http, CHAT, **schema_format(schema))
    assert not judge.takes(grammar, "hello")


def test_a_grammar_that_takes_long_delays_no_other_request(
    fake: FakeServer, http: httpx.Client
) -> None:
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


def test_both_routes_get_the_same_grammar(fake: FakeServer, http: httpx.Client) -> None:
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
