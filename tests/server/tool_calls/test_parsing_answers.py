"""What answers are split into, format by format, whole and however they are cut."""

import re

import pytest

from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from server.tool_calls.parser.deltas import ToolCallDelta
from tests.support.parsing.parsed_answer import joined, parser, split_chunks
from tests.support.parsing.parsing_cases import CALLS, CASES
from tests.support.parsing.parsing_texts import HERMES_OSLO, OSLO, ParsingCase

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def split_case(case: ParsingCase, chunks: list[str]):
    return split_chunks(chunks, case.tools, case.reasoning, starts_in_reasoning=case.within)


@each_case
def test_an_answer_is_split_as_its_format_says(case: ParsingCase):
    assert split_case(case, [case.text]) == case.split


@each_case
def test_an_answer_that_comes_by_the_character_is_split_alike(case: ParsingCase):
    assert split_case(case, list(case.text)) == case.split


@each_case
def test_an_answer_that_is_cut_once_is_split_alike(case: ParsingCase):
    for place in range(len(case.text) + 1):
        assert split_case(case, [case.text[:place], case.text[place:]]) == case.split


def test_every_tool_format_has_a_case():
    assert {TOOL_FORMATS[case.tools].name for case in CASES if case.tools} == {
        format.name for format in TOOL_FORMATS.values()
    }


def test_every_reasoning_format_has_a_case():
    assert {REASONING_FORMATS[case.reasoning].name for case in CASES if case.reasoning} == {
        format.name for format in REASONING_FORMATS.values()
    }


def ids_of(tools: str, text: str) -> list[str | None]:
    machine = parser(tools, None)
    deltas = machine.feed(text) + machine.end()
    return [delta.id for delta in deltas if isinstance(delta, ToolCallDelta) and delta.id]


@pytest.mark.parametrize("case", CALLS, ids=[case.name for case in CALLS])
def test_each_call_has_an_id_of_its_own_in_the_format_the_model_expects(case: ParsingCase):
    pattern = {"mistral": "[A-Za-z0-9]{9}", "kimi_k2": r"functions\.weather:[01]"}.get(
        case.tools or "", "call_[A-Za-z0-9]{24}"
    )
    ids = ids_of(case.tools or "", case.text)
    assert len(ids) == len(set(ids)) == 2
    assert all(re.fullmatch(pattern, id or "") for id in ids)


def test_an_id_that_the_model_wrote_is_kept():
    mistral = '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}'
    assert ids_of("mistral", mistral) == ["a1b2c3d4e"]
    kimi = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids_of("kimi_k2", kimi) == ["functions.now:7"]
    without = "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids_of("kimi_k2", without) == ["functions.now:0"]


@pytest.mark.parametrize("case", CALLS, ids=[case.name for case in CALLS])
def test_without_parallel_calls_only_the_first_goes_out(case: ParsingCase):
    for chunks in ([case.text + "\nWell."], [*case.text, "\nWell."]):
        found = split_chunks(chunks, case.tools, None, parallel=False)
        assert found == ("Let me see.\nWell.", "", (OSLO,))


def test_a_call_goes_out_as_soon_as_its_name_is_certain():
    machine = parser("hermes", None)
    assert machine.feed('<tool_call>{"name": "weather", "argum') == []
    assert machine.num_calls == 0
    (first,) = machine.feed('ents": {')
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "weather", "{")
    assert machine.num_calls == 1
    assert machine.feed('"city": "Os') == [ToolCallDelta(0, '"city": "Os')]


def test_text_arguments_go_out_as_they_come():
    machine = parser("qwen3_coder", None)
    machine.feed("<tool_call><function=weather><parameter=city>\nO")
    assert machine.feed('sl"') == [ToolCallDelta(0, 'sl\\"')]


def test_content_is_held_back_only_while_it_may_become_a_delimiter():
    machine = parser("hermes", "think")
    assert joined(machine.feed("a <tool")).content == "a"
    assert joined(machine.feed("s> b")).content == " <tools> b"
    assert joined(machine.feed("c")).content == "c"


def test_an_unknown_tool_between_delimiters_is_still_a_call():
    text = HERMES_OSLO.replace("weather", "wether")
    assert split_chunks([text], "hermes").calls == (("wether", OSLO[1]),)


WITH_DELIMITERS = [*CALLS, *(case for case in CASES if case.name == "harmony")]


@pytest.mark.parametrize("case", WITH_DELIMITERS, ids=[case.name for case in WITH_DELIMITERS])
def test_what_a_limit_cuts_off_within_a_call_is_no_content(case: ParsingCase):
    format = TOOL_FORMATS[case.tools or ""]
    halves = {word[:length] for word in format.delimiters() for length in range(len(word))}
    for place in range(len(case.text) + 1):
        found = split_chunks([case.text[:place]], case.tools, case.reasoning, limited=True).content
        # Half of what would have begun a call is still content: it may be anything.
        kept = [found.removesuffix(half) for half in halves if found.endswith(half)]
        assert any(case.split.content.startswith(each.strip()) for each in kept), found


def test_a_call_that_a_limit_cuts_off_without_a_delimiter_is_one_by_its_name():
    for text, content in (
        ('{"name": "weather", "para', ""),
        ('{"name": "weath', '{"name": "weath'),
        ('{"name": "Jane", "para', '{"name": "Jane", "para'),
    ):
        assert split_chunks([text], "llama3_json", limited=True).content == content
        assert split_chunks([text], "llama3_json").content == text, "the model's own end"
