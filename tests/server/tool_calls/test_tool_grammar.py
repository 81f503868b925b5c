"""What the grammars of tools let a model write, asked of the library itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.apis.openai.response_format_schema import StructuredOutputs
from server.constrained.grammar_text import Grammar
from server.constrained.reasoning_grammar import after_reasoning
from server.constrained.response_format import format_grammar, json_grammar
from server.errors import FieldPath, RequestError
from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.grammar import tool_grammar
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.deltas import ToolCallDelta
from tests.support.parsing.format_cases import (
    BETWEEN_DELIMITERS,
    NAMES,
    PYTHON,
    SEVERAL,
    call,
    format_name,
    one_call,
    section,
)
from tests.support.parsing.tool_grammars import (
    PARAMETERS,
    accepts,
    grammar_of,
    literals_of,
    request,
    tokenizer_with_special,
    tool,
)

IN_TEXT = [name for name in NAMES if name != "harmony"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with_special(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_must_be_made_is_one_that_the_parser_reads(tokenizer: Tokenizer, name: str):
    grammar = grammar_of(tokenizer, name, tool_choice="required")
    assert grammar is not None
    text = call(name, "weather", '{"city": "Rome", "days": 2}')
    assert accepts(tokenizer, grammar, text)
    format = TOOL_FORMATS[format_name(name)]
    parser = AnswerParser(format, None, tools={"weather": PARAMETERS, "now": {}})
    [first, *others] = parser.feed(text) + parser.end()
    assert isinstance(first, ToolCallDelta) and first.name == "weather"
    arguments = "".join(d.arguments for d in (first, *others) if isinstance(d, ToolCallDelta))
    assert json.loads(arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_a_call_may_be_said_where_one_must_be_made(tokenizer: Tokenizer, name: str):
    grammar = grammar_of(tokenizer, name, tool_choice="required")
    assert grammar is not None
    for text in (
        "Hello",
        call(name, "tomorrow", "{}"),
        call(name, "weather", "{}"),
        call(name, "weather", '{"city": "Rome", "days": "many"}'),
        call(name, "weather", '{"city": "Rome", "x": 1}'),
    ):
        assert not accepts(tokenizer, grammar, text), text
    assert not accepts(tokenizer, grammar, "")


def test_a_named_tool_is_the_only_one(tokenizer: Tokenizer):
    grammar = grammar_of(tokenizer, "hermes", tool_choice=tool("now"))
    assert grammar is not None
    assert accepts(tokenizer, grammar, call("hermes", "now", '{"any": [1]}'))
    assert not accepts(tokenizer, grammar, call("hermes", "weather", '{"city": "Rome"}'))


def test_several_calls_unless_one_at_a_time_is_asked_for(tokenizer: Tokenizer):
    two = "\n".join([call("hermes", "now", "{}")] * 2)
    for parallel, fine in ((None, True), (True, True), (False, False)):
        grammar = grammar_of(
            tokenizer, "hermes", tool_choice="required", parallel_tool_calls=parallel
        )
        assert grammar is not None and accepts(tokenizer, grammar, two) == fine


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_called_exactly_once(
    tokenizer: Tokenizer, name: str, parallel: bool | None
):
    """In a format that writes several calls, and not more where one call is all there may be."""
    many = grammar_of(tokenizer, name, tool_choice="required")
    one = grammar_of(tokenizer, name, tool_choice=tool("now"), parallel_tool_calls=parallel)
    assert many is not None and one is not None
    assert accepts(tokenizer, one, call(name, "now", "{}"))
    assert not accepts(tokenizer, one, "")
    for number in (2, 3):
        several = section(name, *[one_call(name, "now", "{}")] * number)
        assert accepts(tokenizer, many, several) == (name in SEVERAL)
        assert not accepts(tokenizer, one, several), several


STRICT = [tool("weather", parameters=PARAMETERS, strict=True), tool("now")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_has_no_other_arguments_than_its_properties(
    tokenizer: Tokenizer, name: str, choice: str
):
    """Where its schema does not say, and in the objects among its arguments, too."""
    place = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"place": place}}
    more = {"place": {"x": 1, "y": 2}}

    def taken(arguments: dict[str, Any], strict: bool | None, schema: dict[str, Any]) -> bool:
        tools = [tool("f", parameters=schema, strict=strict), tool("g", strict=True)]
        grammar = grammar_of(tokenizer, name, tools=tools, tool_choice=choice)
        assert grammar is not None
        return accepts(tokenizer, grammar, call(name, "f", json.dumps(arguments)))

    assert taken({"place": {"x": 1}}, True, schema)
    assert not taken({"place": {"x": 1}, "z": 3}, True, schema)
    assert not taken(more, True, schema)
    assert taken(more, None, schema) and taken(more, False, schema)
    open_place = {"properties": {"place": place | {"additionalProperties": True}}}
    assert taken(more, True, schema | open_place)


def test_what_a_strict_schema_cannot_have_is_named(tokenizer: Tokenizer):
    parts = [{"properties": {"a": {}}}, {"properties": {"b": {}}}]
    tools = [tool("now"), tool("f", parameters={"allOf": parts}, strict=True)]
    with pytest.raises(RequestError, match="into one object") as refused:
        grammar_of(tokenizer, "hermes", tools=tools)
    assert refused.value.param == "tools[1].function.parameters.allOf"


@pytest.mark.parametrize("name", IN_TEXT)
def test_strict_tools_leave_text_free_and_bind_the_calls_in_it(tokenizer: Tokenizer, name: str):
    grammar = grammar_of(tokenizer, name, tools=STRICT)
    assert grammar is not None
    right = call(name, "weather", '{"city": "Rome"}')
    for text in ("", "Just text.", right, f"Let me see. {right}", call(name, "now", '{"a": 1}')):
        assert accepts(tokenizer, grammar, text), text
    wrong = call(name, "weather", '{"city": "Rome", "days": "many"}')
    assert not accepts(tokenizer, grammar, f"Well: {wrong}")
    if name != "pythonic":  # whose calls need a name that is known, else they are a list in a text
        assert not accepts(tokenizer, grammar, f"Well: {call(name, 'nobody', '{}')}")


def test_tools_that_are_not_strict_bind_nothing(tokenizer: Tokenizer):
    assert grammar_of(tokenizer, "hermes") is None
    requested = json_grammar({"type": "object"}, FieldPath("response_format"))
    none = {"tool_choice": "none"}
    assert grammar_of(tokenizer, "hermes", requested, **none) is requested


def test_a_format_for_the_answer_still_lets_tools_be_called(tokenizer: Tokenizer):
    requested = json_grammar({"type": "object", "required": ["a"]}, FieldPath("response_format"))
    grammar = grammar_of(tokenizer, "hermes", requested)
    assert grammar is not None
    assert accepts(tokenizer, grammar, '{"a": 1}')
    assert accepts(tokenizer, grammar, call("hermes", "weather", '{"city": "Rome"}'))
    assert not accepts(tokenizer, grammar, '{"b": 1}')
    assert not accepts(tokenizer, grammar, "Hello")


def test_every_format_is_tried():
    assert {format.name for format in TOOL_FORMATS.values()} == {*map(format_name, NAMES)}


def test_calls_in_a_format_that_is_not_known_cannot_be_enforced(tokenizer: Tokenizer):
    literals = literals_of(tokenizer)
    for body, param in (
        (request(tool_choice="required"), "tool_choice"),
        (request(tool_choice=tool("now")), "tool_choice"),
        (request(tools=STRICT), "tools"),
    ):
        with pytest.raises(RequestError, match="cannot be enforced") as refused:
            tool_grammar(body, None, None, "", literals)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
    assert tool_grammar(request(), None, None, "", literals) is None


def test_a_schema_that_cannot_be_honoured_is_named(tokenizer: Tokenizer):
    wrong = [tool("now"), tool("f", parameters={"not": {"type": "string"}}, strict=True)]
    with pytest.raises(RequestError) as refused:
        grammar_of(tokenizer, "hermes", tools=wrong, tool_choice="required")
    assert refused.value.param == "tools[1].function.parameters.not"
    assert "or leave `strict` out" in refused.value.message


def test_the_schemas_of_all_tools_together_are_limited(tokenizer: Tokenizer):
    large = {"type": "object", "description": "x" * 200_000}
    several = [tool(f"f{index}", parameters=large) for index in range(6)]
    with pytest.raises(RequestError, match="1048576 bytes in all") as refused:
        grammar_of(tokenizer, "hermes", tools=several, tool_choice="required")
    assert refused.value.param == "tools"
    # Those that are not enforced have no limit, and neither have those that are not offered.
    assert grammar_of(tokenizer, "hermes", tools=several) is None
    assert grammar_of(tokenizer, "hermes", tools=several, tool_choice=tool("f1")) is not None


@pytest.mark.parametrize(("begun", "reasoning"), [(True, "think"), (False, "think")])
def test_reasoning_may_come_before_the_call(tokenizer: Tokenizer, begun: bool, reasoning: str):
    inner = grammar_of(tokenizer, "hermes", tool_choice="required")
    assert inner is not None
    grammar = after_reasoning(
        inner, REASONING_FORMATS[reasoning], literals_of(tokenizer), begun=begun
    )
    right = call("hermes", "now", "{}")
    reasoning_text = "Let me see <tool_call> no.</think>\n\n"
    assert accepts(tokenizer, grammar, ("" if begun else "<think>") + reasoning_text + right)
    assert accepts(tokenizer, grammar, right) == (not begun)
    assert not accepts(tokenizer, grammar, "Hello")


def test_delimiters_of_a_structural_tag_may_be_special_tokens(tokenizer: Tokenizer):
    def grammar(begin: str, trigger: str, end: str) -> Grammar:
        tag = {"begin": begin, "schema": {"type": "integer"}, "end": end}
        asked = {"structural_tag": {"triggers": [trigger], "structures": [tag]}}
        requested = StructuredOutputs.model_validate(asked)
        found = format_grammar(None, requested, literals_of(tokenizer))
        assert found is not None
        return found

    for begin, trigger in (
        ("<|tool_call|>", "<|tool_call|>"),
        ("<|tool_call|>f=", "<|tool_call|>"),
        ("<|tool_call|>f=", "<|tool"),  # ends within the token
        ("f:<|tool_call|>", "f:"),
        ("<f>", "<f"),
    ):
        each = grammar(begin, trigger, "[ARGS]")
        assert accepts(tokenizer, each, f"so {begin}12[ARGS] then {begin}3[ARGS]"), begin
        assert not accepts(tokenizer, each, f"so {begin}x[ARGS]", whole=False), begin
        assert not accepts(tokenizer, each, f"so {begin}12 and more", whole=False), begin
        assert accepts(tokenizer, each, "nothing of it")


@pytest.mark.parametrize("name", BETWEEN_DELIMITERS)
def test_a_pattern_with_alternatives_ends_at_the_delimiter(tokenizer: Tokenizer, name: str):
    schema = {"properties": {"x": {"type": "string", "pattern": "^(?:a)|(?:b)$"}}}
    tools = [tool("f", parameters=schema | {"required": ["x"]})]
    grammar = grammar_of(tokenizer, name, tools=tools, tool_choice="required")
    assert grammar is not None
    for text, right in (("a", True), ("b", True), ("c", False)):
        assert accepts(tokenizer, grammar, call(name, "f", json.dumps({"x": text}))) == right, text


@pytest.mark.parametrize("name", [*BETWEEN_DELIMITERS, *PYTHON])
def test_definitions_are_copied_to_arguments_that_refer_to_them_within_a_limit(
    tokenizer: Tokenizer, name: str
):
    def grammar(value: dict[str, Any]) -> Grammar | None:
        properties = {f"p{n}": value for n in range(200)}
        definitions = {"$defs": {"d": {"type": "integer", "description": "x" * 30_000}}}
        tools = [tool("f", parameters={"properties": properties} | definitions)]
        return grammar_of(tokenizer, name, tools=tools, tool_choice="required")

    plain = grammar({"type": "integer"})
    assert plain is not None and len(json.dumps(plain.grammars)) < 200_000
    with pytest.raises(RequestError, match="repeated for each argument") as refused:
        grammar({"$ref": "#/$defs/d"})
    assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", [*BETWEEN_DELIMITERS, *PYTHON])
def test_arguments_between_delimiters_are_of_the_types_that_the_schema_names(
    tokenizer: Tokenizer, name: str
):
    """Those that are read again are those that were meant."""
    schema = {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
        },
        "required": ["note", "place"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    }
    grammar = grammar_of(
        tokenizer, name, tools=[tool("f", parameters=schema)], tool_choice="required"
    )
    assert grammar is not None
    full = {
        "note": 'two\nlines, <b> "quoted"',
        "unit": "kelvin",
        "maybe": "perhaps",
        "place": {"x": 1.5},
        "tags": ["a", "b"],
        "exact": True,
    }
    for meant in (full, {"note": "x", "place": {"x": -2}}):
        text = call(name, "f", json.dumps(meant))
        assert accepts(tokenizer, grammar, text)
        parser = AnswerParser(TOOL_FORMATS[name], None, tools={"f": schema})
        deltas = [d for d in parser.feed(text) + parser.end() if isinstance(d, ToolCallDelta)]
        assert json.loads("".join(delta.arguments for delta in deltas)) == meant
    for wrong in (
        full | {"unit": "miles"},
        full | {"place": {"x": "far"}},
        full | {"tags": [1]},
        full | {"exact": "yes"},
        {"note": "x"},
    ):
        assert not accepts(tokenizer, grammar, call(name, "f", json.dumps(wrong))), wrong
