"""What the grammars of tools let a model write, asked of the library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import write_tokenizer
from tokenizers import AddedToken, Tokenizer

from server.call_arguments import ArgumentForm
from server.errors import RequestError
from server.grammar_marks import GrammarMarks
from server.parsing.answer import AnswerParser
from server.parsing.deltas import ToolCallDelta
from server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from server.schema.chat import ChatRequest
from server.schema.structured import StructuredOutputs
from server.structured import Grammar, json_grammar, requested
from server.tool_grammar import FORMS, OLD_MISTRAL, after_thought, tool_grammar

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "</think>", "<|tool_call_begin|>"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = [*FORMS, "old mistral"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return tokenizer


def marks_of(tokenizer: Tokenizer) -> GrammarMarks:
    return GrammarMarks({tokenizer.token_to_id(word): word for word in SPECIAL})


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def request(**more: Any) -> ChatRequest:
    tools = [tool("weather", parameters=PARAMETERS), tool("now")]
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": tools, **more})


def accepts(tokenizer: Tokenizer, grammar: Grammar, text: str, *, whole: bool = True) -> bool:
    """Whether the text may be said; `whole`: and then the answer may end."""
    from llguidance import LLMatcher, LLTokenizer

    library = LLTokenizer(tokenizer.to_str(), eos_token=0)
    matcher = LLMatcher(library, json.dumps({"grammars": grammar.grammars}))
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and (not whole or matcher.is_accepting())


def grammar_of(tokenizer: Tokenizer, name: str, wanted: Grammar | None = None, **more: Any):
    format = TOOL_FORMATS["mistral" if name == "old mistral" else name]
    template = "" if name == "old mistral" else "[ARGS]"
    return tool_grammar(request(**more), wanted, format, template, marks_of(tokenizer))


def call(name: str, function: str, arguments: str) -> str:
    form = OLD_MISTRAL if name == "old mistral" else FORMS[name]
    written = arguments
    if form.arguments is not None:
        written = "".join([argument(form.arguments, *item) for item in json.loads(written).items()])
    return form.opens + form.begin.replace("NAME", function) + written + form.end


def argument(form: ArgumentForm, key: str, value: object) -> str:
    is_text = isinstance(value, str)
    shown = value if isinstance(value, str) else json.dumps(value)
    return (
        (form.text if is_text else form.json).replace("KEY", key)
        + shown
        + form.json_end
        + form.close
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_must_be_made_is_one_that_the_parser_reads(tokenizer: Tokenizer, name: str):
    grammar = grammar_of(tokenizer, name, tool_choice="required")
    assert grammar is not None
    text = call(name, "weather", '{"city": "Rome", "days": 2}')
    assert accepts(tokenizer, grammar, text)
    format = TOOL_FORMATS["mistral" if name == "old mistral" else name]
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


STRICT = [tool("weather", parameters=PARAMETERS, strict=True), tool("now")]


@pytest.mark.parametrize("name", NAMES)
def test_strict_tools_leave_text_free_and_bind_the_calls_in_it(tokenizer: Tokenizer, name: str):
    grammar = grammar_of(tokenizer, name, tools=STRICT)
    assert grammar is not None
    right = call(name, "weather", '{"city": "Rome"}')
    for text in ("", "Just text.", right, f"Let me see. {right}", call(name, "now", '{"a": 1}')):
        assert accepts(tokenizer, grammar, text), text
    wrong = call(name, "weather", '{"city": "Rome", "days": "many"}')
    for text in (wrong, call(name, "nobody", "{}")):
        assert not accepts(tokenizer, grammar, f"Well: {text}"), text


def test_tools_that_are_not_strict_bind_nothing(tokenizer: Tokenizer):
    assert grammar_of(tokenizer, "hermes") is None
    wanted = json_grammar({"type": "object"}, "response_format")
    none = {"tool_choice": "none"}
    assert grammar_of(tokenizer, "hermes", wanted, **none) is wanted


def test_a_format_for_the_answer_still_lets_tools_be_called(tokenizer: Tokenizer):
    wanted = json_grammar({"type": "object", "required": ["a"]}, "response_format")
    grammar = grammar_of(tokenizer, "hermes", wanted)
    assert grammar is not None
    assert accepts(tokenizer, grammar, '{"a": 1}')
    assert accepts(tokenizer, grammar, call("hermes", "weather", '{"city": "Rome"}'))
    assert not accepts(tokenizer, grammar, '{"b": 1}')
    assert not accepts(tokenizer, grammar, "Hello")


@pytest.mark.parametrize("format", ["lfm2", "pythonic", "harmony", None])
def test_calls_that_are_written_as_python_cannot_be_enforced(
    tokenizer: Tokenizer, format: str | None
):
    known = None if format is None else TOOL_FORMATS[format]
    marks = marks_of(tokenizer)
    for body, param in (
        (request(tool_choice="required"), "tool_choice"),
        (request(tool_choice=tool("now")), "tool_choice"),
        (request(tools=STRICT), "tools"),
    ):
        with pytest.raises(RequestError, match="cannot be enforced") as refused:
            tool_grammar(body, None, known, "", marks)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
    assert tool_grammar(request(), None, known, "", marks) is None


def test_a_schema_that_cannot_be_honoured_is_named(tokenizer: Tokenizer):
    wrong = [tool("now"), tool("f", parameters={"not": {"type": "string"}})]
    with pytest.raises(RequestError) as refused:
        grammar_of(tokenizer, "hermes", tools=wrong, tool_choice="required")
    assert "tools[1].function.parameters" in (refused.value.param or "")


@pytest.mark.parametrize(("begun", "reasoning"), [(True, "think"), (False, "think")])
def test_reasoning_may_come_before_the_call(tokenizer: Tokenizer, begun: bool, reasoning: str):
    inner = grammar_of(tokenizer, "hermes", tool_choice="required")
    assert inner is not None
    grammar = after_thought(inner, REASONING_FORMATS[reasoning], marks_of(tokenizer), begun=begun)
    right = call("hermes", "now", "{}")
    thought = "Let me see <tool_call> no.</think>\n\n"
    assert accepts(tokenizer, grammar, ("" if begun else "<think>") + thought + right)
    assert accepts(tokenizer, grammar, right) == (not begun)
    assert not accepts(tokenizer, grammar, "Hello")


def test_marks_of_a_structural_tag_may_be_special_tokens(tokenizer: Tokenizer):
    def grammar(begin: str, trigger: str, end: str) -> Grammar:
        tag = {"begin": begin, "schema": {"type": "integer"}, "end": end}
        wanted = StructuredOutputs(structural_tag={"triggers": [trigger], "structures": [tag]})
        found = requested(None, wanted, marks_of(tokenizer))
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


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.arguments])
def test_arguments_between_marks_are_of_the_types_that_the_schema_names(
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
