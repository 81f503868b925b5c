"""Which part of an answer each of its characters is of, however the answer is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tool_calls.parser.parts import Part
from tests.support.examples import examples
from tests.support.parsing.any_answers import chunks_of, reasoning_names, texts, tool_names
from tests.support.parsing.parsed_answer import parser
from tests.support.parsing.parsing_cases import CASES
from tests.support.parsing.parsing_texts import ParsingCase


def parts_of(
    chunks: list[str], tools: str | None, reasoning: str | None, *, within: bool = False
) -> list[Part]:
    """Of each character, asked for as soon as it is certain."""
    machine = parser(tools, reasoning, starts_in_reasoning=within)
    parts: list[Part] = []
    for chunk in chunks:
        machine.feed(chunk)
        parts.extend(
            [machine.parts.at(place) for place in range(len(parts), machine.parts.decided)]
        )
    machine.end()
    return parts + [machine.parts.at(place) for place in range(len(parts), len("".join(chunks)))]


def of_part(text: str, parts: list[Part], part: Part) -> str:
    return "".join([char for char, each in zip(text, parts, strict=True) if each == part])


@examples(600)
@given(
    texts,
    st.lists(st.integers(0, 1 << 16), max_size=20),
    tool_names,
    reasoning_names,
    st.booleans(),
)
def test_parts_do_not_depend_on_how_an_answer_is_cut(
    text: str, cuts: list[int], tools: str | None, reasoning: str | None, within: bool
):
    whole = parts_of([text], tools, reasoning, within=within)
    assert parts_of(chunks_of(text, cuts), tools, reasoning, within=within) == whole
    assert parts_of(list(text), tools, reasoning, within=within) == whole


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_parts_are_what_the_answer_is_split_into(case: ParsingCase):
    parts = parts_of([case.text], case.tools, case.reasoning, within=case.within)
    # Content on both sides of a delimiter is joined by a line end, which no token has.
    content = of_part(case.text, parts, "content").replace("\n", "")
    # A message of harmony that breaks off in its head begins with what was a delimiter.
    assert case.split.content.replace("\n", "").removeprefix("<|start|>") == content
    reasoning = of_part(case.text, parts, "reasoning").replace("\n", "")
    assert reasoning.strip() == case.split.reasoning.replace("\n", "").strip()


def test_a_part_is_certain_as_soon_as_its_text_goes_out():
    machine = parser("hermes", "think")
    fed = ""
    for text, held in (("<think>", 0), ("hm\n", 0), ("</thi", 5), ("nk>", 0), ("\nYes.\n", 1)):
        machine.feed(text)
        fed += text
        assert len(fed) - machine.parts.decided == held, text
