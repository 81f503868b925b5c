"""Calls that a family's template prints are read back as they were, in the format found by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from server.apis.openai.chat_schema import Message
from server.constrained.grammar_text import GrammarLiterals
from server.prompt.template_messages import template_messages
from server.prompt.tokenizer import ChatTokenizer
from server.tool_calls.format_types import Formats
from server.tool_calls.formats import detect
from server.tool_calls.grammar import tool_grammar
from server.tool_calls.output_parser import OutputFormats
from server.tool_calls.parser.answer import AnswerParser
from tests.support.families.model_families import FAMILIES, WITH_TOOLS, load_family
from tests.support.parsing.parsed_answer import TOOLS, Split, joined
from tests.support.parsing.tool_grammars import accepts, request

Call = tuple[str, dict[str, Any]]
NESTED = {"a": [1, {"b": None}], "c d": {"e": "f\n<g>"}}
CALLS: dict[str, list[Call]] = {
    "one": [("weather", {"city": "Oslo", "days": 3})],
    "no arguments": [("now", {})],
    "several": [("weather", {"city": "Oslo"}), ("now", {}), ("weather", {"city": "Bonn"})],
    "nested": [("weather", {"city": "x", "options": NESTED, "hours": [1, [2.5, "3"], True]})],
    "all types": [("weather", {"exact": True, "wind": -0.5, "days": 0, "note": None})],
    "odd text": [("weather", {"city": 'a "b" \\ {c} [d] ü 😀\n\tif x < 3 && y > 4: 12'})],
}
# Their templates print earlier calls with ids, or with the recipient first.
OTHER_FORMS = ("mixtral_8x22b", "gpt_oss")
CUTS = ["one", "several", "nested"]


class Answer(NamedTuple):
    """What a model has written, as its template prints it in the next request."""

    formats: Formats
    text: str
    in_reasoning: bool


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    return {name: load_family(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def formats_of(tokenizer: ChatTokenizer) -> Formats:
    assert tokenizer.template is not None
    return detect(tokenizer.template.source, tokenizer.special_words().values())


def answer_of(tokenizer: ChatTokenizer, calls: list[Call], **more: Any) -> Answer:
    question: dict[str, Any] = {"role": "user", "content": "?"}
    entries = [
        {"id": f"abcdefgh{index}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "tool_calls": entries, **more}
    messages = [Message.model_validate(each) for each in (question, answer)]
    rendered = template_messages(messages, tokenizer)
    prompt = tokenizer.render(rendered[:1])
    text = tokenizer.render(rendered, add_generation_prompt=False).removeprefix(prompt)
    words = [tokenizer.tokenizer.id_to_token(id) or "" for id in tokenizer.eos_ids]
    text = text[: min([place for word in words if (place := text.find(word)) >= 0] or [len(text)])]
    formats = formats_of(tokenizer)
    reasoning = formats.reasoning
    return Answer(formats, text, reasoning is not None and reasoning.open_after(prompt))


def parsed(answer: Answer, chunks: list[str]) -> Split:
    parser = AnswerParser(
        answer.formats.tools,
        answer.formats.reasoning,
        tools=TOOLS,
        starts_in_reasoning=answer.in_reasoning,
    )
    return joined([delta for chunk in chunks for delta in parser.feed(chunk)] + parser.end())


def calls_in(split: Split) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in split.calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formats_of_a_family_are_found_by_its_template(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    found, family = formats_of(tokenizers[name]), FAMILIES[name]
    assert (found.tools.name if found.tools else None) == family.tools
    assert (found.reasoning.name if found.reasoning else None) == family.reasoning


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_printed_call_is_read_back(tokenizers: dict[str, ChatTokenizer], name: str, kind: str):
    calls = CALLS[kind][:1] if name == "gpt_oss" else CALLS[kind]  # one call ends its answer
    answer = answer_of(tokenizers[name], calls)
    found = parsed(answer, [answer.text])
    assert calls_in(found) == calls
    assert (found.content, found.reasoning) == ("", "")
    assert parsed(answer, list(answer.text)) == found


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_printed_call_is_read_back_wherever_its_text_is_cut(
    tokenizers: dict[str, ChatTokenizer], name: str, kind: str
):
    answer = answer_of(tokenizers[name], CALLS[kind])
    whole = parsed(answer, [answer.text])
    for place in range(len(answer.text) + 1):
        assert parsed(answer, [answer.text[:place], answer.text[place:]]) == whole


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if FAMILIES[name].reasoning])
def test_reasoning_before_a_printed_call_is_read_back(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    answer = answer_of(tokenizers[name], CALLS["one"], reasoning_content="So, the weather.")
    found = parsed(answer, [answer.text])
    assert (found.reasoning, found.content) == ("So, the weather.", "")
    assert calls_in(found) == CALLS["one"]


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name != "gemma3_tools"])
def test_content_before_a_printed_call_is_read_back(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    answer = answer_of(tokenizers[name], CALLS["one"], content="Let me see.")
    found = parsed(answer, [answer.text])
    assert calls_in(found) == CALLS["one"]
    # gpt-oss's template prints it as reasoning.
    assert found.content + found.reasoning == "Let me see."


@pytest.mark.parametrize("name", FAMILIES)
def test_the_delimiters_of_a_family_stay_in_the_text_that_is_parsed(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    tokenizer = tokenizers[name]
    kept = OutputFormats.of(tokenizer, "auto", "auto").kept_tokens
    calls = CALLS["one"] if FAMILIES[name].tools else []
    if calls:
        text = answer_of(tokenizer, calls).text
        tokens = tokenizer.encode(text)
        assert tokenizer.detokenizer(kept=kept).feed(tokens) == text
    assert not kept.ids & {tokenizer.tokenizer.token_to_id(word) for word in ("<s>", "<eos>")}


def test_a_model_that_forgets_the_namespace_calls_the_function_it_was_offered(tmp_path: Path):
    formats = formats_of(load_family(tmp_path, "gpt_oss"))
    for head in ("<|channel|>commentary to=weather", " to=weather<|channel|>commentary"):
        text = f'{head} <|constrain|>json<|message|>{{"city": "Oslo"}}<|call|>'
        found = parsed(Answer(formats, text, False), [text])
        assert calls_in(found) == [("weather", {"city": "Oslo"})]
    other = '<|channel|>commentary to=browser.open<|message|>{"id": 1}<|call|>'
    assert parsed(Answer(formats, other, False), [other]) == Split('{"id": 1}')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in OTHER_FORMS])
def test_a_forced_call_is_written_as_the_template_prints_it(
    tokenizers: dict[str, ChatTokenizer], name: str, choice: Any
):
    tokenizer = tokenizers[name]
    format = formats_of(tokenizer).tools
    assert format is not None and tokenizer.template is not None
    literals = GrammarLiterals(tokenizer.special_words())
    body = request(tool_choice=choice)
    grammar = tool_grammar(body, None, format, tokenizer.template.source, literals)
    assert grammar is not None
    for kind in ("one", "no arguments", "several"):
        text = answer_of(tokenizer, CALLS[kind]).text
        text = text.removeprefix("<think>\n\n</think>\n\n").removeprefix("\n<think></think>")
        text = text.removeprefix("\n</think>\n\n")  # the prompt has opened it
        allowed = choice == "required" or kind == "no arguments"
        end = FAMILIES[name].ends[0]
        assert accepts(tokenizer.tokenizer, grammar, text.strip(), end=end) == allowed, text
