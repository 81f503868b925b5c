# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines
"""Every way of cutting an answer gives the same, nothing raises, arguments are what was meant."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.source import TextSource
from tests.support.examples import examples
from tests.support.parsing.any_answers import chunks_of, reasoning_names, texts, tool_names
from tests.support.parsing.parsed_answer import joined, parser, split_chunks
from tests.support.parsing.parsing_cases import CALLS
from tests.support.parsing.parsing_texts import ParsingCase

# Every way of cutting a text.


@examples(1500)
@given(
    texts,
    st.lists(st.integers(0, 1 << 16), max_size=20),
    tool_names,
    reasoning_names,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_text_is_split_the_same_however_it_is_cut(
    text: str,
    cuts: list[int],
    tools: str | None,
    reasoning: str | None,
    within: bool,
    parallel: bool,
    limited: bool,
):
    options = {"starts_in_reasoning": within, "parallel": parallel, "limited": limited}
    whole = split_chunks([text], tools, reasoning, **options)
    assert split_chunks(chunks_of(text, cuts), tools, reasoning, **options) == whole
    assert split_chunks(text, tools, reasoning, **options) == whole


@examples(300)
@given(
    st.text(st.characters(exclude_characters="<[{H", codec="utf-8")),
    st.lists(st.integers(0, 1 << 16), max_size=8),
    tool_names,
    st.sampled_from([None, *(name for name in REASONING_FORMATS if name != "granite")]),
)
def test_text_without_delimiters_comes_out_as_it_is(
    text: str, cuts: list[int], tools: str | None, reasoning: str | None
):
    assert split_chunks(chunks_of(text, cuts), tools, reasoning) == (text, "", ())


@examples(300)
@given(st.text(max_size=40), st.sampled_from(sorted({"<", "<tool", "<tool_call", "<think", "[T"})))
def test_text_with_half_a_delimiter_comes_out_as_it_is(text: str, half: str):
    whole = f"x{text}{half}"
    if not any(delimiter in whole for delimiter in ("<tool_call>", "[TOOL_CALLS]")):
        assert split_chunks(whole, "hermes", "think") == (whole, "", ())
        assert split_chunks(whole, "mistral", "mistral") == (whole, "", ())


@examples(300)
@given(
    st.sampled_from(CALLS),
    st.lists(st.text("abc .é\n", min_size=1), min_size=2, max_size=4),
)
def test_words_between_calls_are_kept_and_so_are_the_calls(case: ParsingCase, between: list[str]):
    section = case.text.removeprefix("Let me see.")
    found = split_chunks([section.join(f"x{words}x" for words in between)], case.tools)
    assert found.content == "\n".join(f"x{words}x" for words in between)
    assert found.calls == case.split.calls * (len(between) - 1)


# Arguments are what the model meant, and JSON.

words = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(words, values, max_size=4)


@examples(300)
@given(arguments, st.sampled_from([None, 1]), st.booleans())
def test_json_arguments_are_passed_on_to_the_byte(
    meant: dict[str, object], indent: int | None, ascii: bool
):
    text = json.dumps(meant, indent=indent, ensure_ascii=ascii)
    for tools, answer in (
        ("hermes", '<tool_call>{"name": "now", "arguments": %s}</tool_call>'),
        ("mistral", "[TOOL_CALLS]now[ARGS]%s"),
        ("llama3_json", '{"name": "now", "parameters": %s}'),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>%s<|call|>"),
    ):
        assert split_chunks([answer % text], tools).calls == (("now", text),)


@examples(300)
@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), values, max_size=4))
def test_python_arguments_become_the_same_json(meant: dict[str, object]):
    inside = ", ".join(f"{key}={value!r}" for key, value in meant.items())
    found = split_chunks([f"[now({inside})]"], "pythonic")
    assert (found.content, len(found.calls)) == ("", 1)
    assert json.loads(found.calls[0][1]) == meant


@examples(300)
@given(st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), values, max_size=4))
def test_arguments_between_delimiters_become_the_same_json(meant: dict[str, object]):
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    kinds |= {list: "array", dict: "object"}
    schema = {"properties": {key: {"type": kinds[type(value)]} for key, value in meant.items()}}
    written = {key: v if isinstance(v, str) else json.dumps(v) for key, v in meant.items()}
    parameters = "".join(
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in written.items()
    )
    machine = AnswerParser(TOOL_FORMATS["qwen3_coder"], None, tools={"now": schema})
    answer = f"<tool_call>\n<function=now>\n{parameters}</function>\n</tool_call>"
    found = joined(machine.feed(answer) + machine.end())
    assert json.loads(found.calls[0][1]) == meant


# Work grows with the text, not with its square.

MAX_KEPT = 64  # characters


@pytest.mark.parametrize(
    ("tools", "reasoning", "before", "unit", "length"),
    [
        ("hermes", None, '<tool_call>{"name": "weather", "arguments": {"city": "', "abcd", 1 << 20),
        ("hermes", None, '<tool_call>{"name": "weather", "arguments": {"hours": ', "[[[[", 1 << 16),
        ("hermes", None, '<tool_call>{"arguments": {"city": "', "ab\\n", 1 << 16),
        ("hermes", None, "<tool_call>", "    ", 1 << 16),
        ("hermes", "think", "<think>", "</th", 1 << 16),
        ("hermes", "think", "", "\n\n  ", 1 << 16),
        ("hermes", "think", "a", "<too", 1 << 16),
        ("hermes", None, "", "<tool_call>", 1 << 16),
        ("qwen3_coder", None, "<function=weather><parameter=days>", "\n</p", 1 << 16),
        ("qwen3_coder", None, "<function=weather><parameter=city>", "\n</p", 1 << 16),
        ("pythonic", None, "[weather(city='", 'a"\\"', 1 << 16),
        ("deepseek_v3", None, "<｜tool▁calls▁begin｜>", "    ", 1 << 16),
        ("harmony", "harmony", "", "<|channel|>", 1 << 16),
    ],
)
def test_no_text_chunk_is_read_more_than_a_few_times(
    tools: str,
    reasoning: str | None,
    before: str,
    unit: str,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
):
    kept: list[int] = []
    feed = TextSource.feed

    def counting(source: TextSource, text: str) -> None:
        kept.append(len(source._text) - source._pos)  # what will be looked at again
        feed(source, text)

    monkeypatch.setattr(TextSource, "feed", counting)
    machine = parser(tools, reasoning)
    machine.feed(before)
    for _ in range(length // len(unit)):
        machine.feed(unit)
    machine.end()
    assert max(kept) < MAX_KEPT
