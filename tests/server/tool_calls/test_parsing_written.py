# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines
"""Calls that are written in a format are read back as they were meant, whatever their words are."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsed_answer import joined

from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.parser.answer import AnswerParser

Call = tuple[str, dict[str, Any]]
MARKS = sorted(
    {
        mark
        for table in (TOOL_FORMATS, REASONING_FORMATS)
        for f in table.values()
        for mark in f.marks()
    }
)
PIECES = (
    *MARKS,
    '"',
    "'",
    "\\",
    "\\u00e9",
    "\\ud83d",
    "{",
    "}}",
    "[",
    "]",
    "(",
    ")",
    ",",
    "=",
    ":",
)
PIECES += ("\n", "\r", "\t", "\x00", "\u2028", "é", "😀", "</", "<|", "```", "null", "1")
words = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=4).map("".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
scalars = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", dict: "object"}


def objects(key: str = "arguments") -> Callable[[Call], str]:
    return lambda call: '{"name": "%s", "%s": %s}' % (call[0], key, json.dumps(call[1]))  # noqa: UP031


def headed(before: str, after: str, end: str) -> Callable[[Call], str]:
    return lambda call: f"{before}{call[0]}{after}{json.dumps(call[1], ensure_ascii=False)}{end}"


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def marked(head: str, argument: str, end: str) -> Callable[[Call], str]:
    """`argument` is written with KEY, VALUE, and TEXT for whether the value is a text."""

    def write(call: Call) -> str:
        name, arguments = call
        text = head.replace("NAME", name)
        for key, value in arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            whole = argument.replace("KEY", key).replace("TEXT", kind)
            text += whole.replace("VALUE", plain(value))
        return text + end

    return write


class Form(NamedTuple):
    """How calls are written, and what stands before, between and behind them."""

    write: Callable[[Call], str]
    begin: str = ""
    between: str = ""
    end: str = ""
    value_end: str = ""  # ends a value, which cannot have it


V3_HEAD = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
DSML_END = "</｜DSML｜parameter>"
CODER = "<parameter=KEY>\nVALUE\n</parameter>\n"
MINIMAX = '<parameter name="KEY">\nVALUE\n</parameter>\n'
FORMS = {
    "hermes": Form(objects(), "<tool_call>\n", "\n</tool_call>\n<tool_call>", "</tool_call>"),
    "granite": Form(objects(), "<|tool_call|>[", ", ", "]"),
    "nemotron_json": Form(objects(), "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "llama3_json": Form(objects("parameters"), "<|python_tag|>", "; "),
    "mistral": Form(headed("[TOOL_CALLS]", "[ARGS]", "")),
    "deepseek_v3": Form(
        headed(V3_HEAD, "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Form(
        headed("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Form(
        marked(
            '<｜DSML｜invoke name="NAME">\n',
            f'<｜DSML｜parameter name="KEY" string="TEXT">VALUE{DSML_END}\n',
            "</｜DSML｜invoke>",
        ),
        "<｜DSML｜function_calls>\n",
        "\n",
        "\n</｜DSML｜function_calls>",
        DSML_END,
    ),
    "kimi_k2": Form(
        headed(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "harmony": Form(
        headed("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        between="<|start|>assistant",
    ),
    "pythonic": Form(python, "<|python_start|>[", ", ", "]<|python_end|>"),
    "lfm2": Form(python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": Form(python, "<function_calls>\n", "\n", "\n</function_calls>"),
    "qwen3_coder": Form(
        marked("<tool_call>\n<function=NAME>\n", CODER, "</function>\n</tool_call>"),
        between="\n",
        value_end="</parameter>",
    ),
    "seed_oss": Form(
        marked("<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>"),
        "<seed:tool_call>",
        "</seed:tool_call>\n<seed:tool_call>",
        "</seed:tool_call>",
        "</parameter>",
    ),
    "minimax_m2": Form(
        marked('<invoke name="NAME">\n', MINIMAX, "</invoke>"),
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
        "</parameter>",
    ),
    "glm45": Form(
        marked("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", ""),
        "<tool_call>",
        "</tool_call>\n<tool_call>",
        "</tool_call>",
        "</arg_value>",
    ),
}


def test_every_format_is_written():
    assert set(FORMS) == {format.name for format in TOOL_FORMATS.values()}


@st.composite
def call_lists(draw: st.DrawFn, name: str) -> list[Call]:
    free = TOOL_FORMATS[name].style in ("object", "header", "harmony")
    keys = words if free else st.from_regex("[a-z_]{1,6}", fullmatch=True)
    arguments = st.dictionaries(keys, values, max_size=3)
    return [
        (f"f{place}", each)
        for place, each in enumerate(draw(st.lists(arguments, min_size=1, max_size=3)))
    ]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_calls_are_read_back_as_they_were_meant(name: str, data: st.DataObject):
    calls = data.draw(call_lists(name))
    form = FORMS[name]
    said = [plain(value) for _, arguments in calls for value in arguments.values()]
    assume(not form.value_end or all(form.value_end not in text for text in said))
    text = form.begin + form.between.join(map(form.write, calls)) + form.end
    tools = {
        each: {"properties": {key: {"type": KINDS[type(value)]} for key, value in given.items()}}
        for each, given in calls
    }
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    machine = AnswerParser(TOOL_FORMATS[name], None, tools=tools)
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = joined([delta for piece in pieces for delta in machine.feed(piece)] + machine.end())
    assert [(each, json.loads(given)) for each, given in found.calls] == calls
    assert found.content == ""
