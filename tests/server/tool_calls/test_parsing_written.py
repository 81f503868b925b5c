"""Calls that are written in a format are read back as they were meant, whatever their words are."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.tool_calls.format_types import ToolFormat
from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.parser.answer import AnswerParser
from tests.support.parsing.format_cases import FORMAT_CASES, NAMES, format_name, one_call, section
from tests.support.parsing.parsed_answer import joined

Call = tuple[str, dict[str, Any]]
MARKS = sorted(
    {
        delimiter
        for table in (TOOL_FORMATS, REASONING_FORMATS)
        for f in table.values()
        for delimiter in f.delimiters()
    }
)
TEXTS = (
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
TEXTS += ("\n", "\r", "\t", "\x00", "\u2028", "é", "😀", "</", "<|", "```", "null", "1")
words = st.lists(st.sampled_from(TEXTS) | st.text(max_size=2), max_size=4).map("".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
scalars = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", dict: "object"}


@st.composite
def call_lists(draw: st.DrawFn, format: ToolFormat) -> list[Call]:
    free = format.style in ("object", "header", "harmony")
    keys = words if free else st.from_regex("[a-z_]{1,6}", fullmatch=True)
    arguments = st.dictionaries(keys, values, max_size=3)
    return [
        (f"f{place}", each)
        for place, each in enumerate(draw(st.lists(arguments, min_size=1, max_size=3)))
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_calls_are_read_back_as_they_were_meant(name: str, data: st.DataObject):
    format = TOOL_FORMATS[format_name(name)]
    calls = data.draw(call_lists(format))
    end = FORMAT_CASES[name].value_end
    said = [str(value) for _, arguments in calls for value in arguments.values()]
    assume(not end or all(end not in text for text in said))
    # A value that is written without line ends around it loses its own.
    trimmed = format.trim_value and not format.value_close.startswith("\n")
    assume(not trimmed or all(text == text.strip("\n") for text in said))
    ascii = data.draw(st.booleans())
    texts = [
        one_call(name, function, json.dumps(arguments, ensure_ascii=ascii), repr)
        for function, arguments in calls
    ]
    text = section(name, *texts)
    tools = {
        each: {"properties": {key: {"type": KINDS[type(value)]} for key, value in encoded.items()}}
        for each, encoded in calls
    }
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    machine = AnswerParser(format, None, tools=tools)
    chunks = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = joined([delta for each in chunks for delta in machine.feed(each)] + machine.end())
    assert [(each, json.loads(encoded)) for each, encoded in found.calls] == calls
    assert found.content == ""
