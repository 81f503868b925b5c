"""tiny-chat's training data of tools, JSON and reasoning is right, and held out where tested."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

import model_zoo.tiny_chat
from model_zoo.tiny_chat.training.dialogs import (
    KINDS,
    NO_TOOL,
    SHARES,
    Dialog,
    dialog,
    held_dialogs,
)
from model_zoo.tiny_chat.training.phrases import CHOICE, read_sections
from model_zoo.tiny_chat.training.rendering import CHAT_TEMPLATE, answer_text, segments_of
from model_zoo.tiny_chat.training.skills import is_held
from server.prompt.chat_template import ChatTemplate
from server.tool_calls.formats import detect
from server.tool_calls.parser.answer import AnswerParser
from tests.support.parsing.parsed_answer import Split, joined

FOLDER = Path(model_zoo.tiny_chat.__file__).parent
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {})
COUNT = 150
SUM = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
COMPARISON = re.compile(r"(\d+) ([<>=]) (\d+)")


def trained(kind: str, count: int = COUNT) -> Iterator[Dialog]:
    random = Random(f"train {kind}")
    return (dialog(random, kind) for _ in range(count))


def both(kind: str) -> list[Dialog]:
    return [*trained(kind), *held_dialogs(kind, COUNT)]


def rendered(each: Dialog, *, prompt: bool = False, **extra: Any) -> str:
    return TEMPLATE.render(
        each.messages[:-1] if prompt else each.messages,
        add_generation_prompt=prompt,
        continue_final_message=False,
        max_chars=100_000,
        extra=extra,
        tools=each.tools,
    )


def functions(each: Dialog) -> dict[str, dict[str, Any]]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in each.tools}


def split(each: Dialog) -> Split:
    """The last answer as the server reads it."""
    formats = detect(CHAT_TEMPLATE)
    learned = "".join(text for text, _ in segments_of(each)[-1:]).removesuffix("<|im_end|>")
    parser = AnswerParser(
        formats.tools,
        formats.reasoning,
        tools=functions(each),
        starts_in_reasoning=each.thinking,
    )
    return joined(parser.feed(learned) + parser.end())


def calls(each: Dialog) -> list[tuple[str, dict[str, Any], str]]:
    """Every call of a dialog: name, arguments and the question before it."""
    found: list[tuple[str, dict[str, Any], str]] = []
    question = ""
    for message in each.messages:
        question = message["content"] if message["role"] == "user" else question
        for call in message.get("tool_calls", ()):
            found.append((call["function"]["name"], call["function"]["arguments"], question))
    return found


def test_the_server_sees_how_it_calls_and_thinks():
    formats = detect(CHAT_TEMPLATE)
    assert formats.tools is not None and formats.tools.name == "hermes"
    assert formats.reasoning is not None and formats.reasoning.name == "think"
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("kind", SHARES)
def test_training_reads_what_the_template_prints(kind: str):
    for each in trained(kind):
        segments = segments_of(each)
        prompt = rendered(each, prompt=True, enable_thinking=each.thinking)
        assert "".join(text for text, _ in segments).startswith(prompt)
        assert each.keys_given or prompt == "".join(text for text, _ in segments[:-1])
        if not each.thinking:
            assert rendered(each) == "".join(text for text, _ in segments) + "\n"


def test_thinking_is_off_unless_it_is_asked_for():
    [each] = held_dialogs("JSON", 1)
    ends = {
        "": {},
        "<think>\n": {"enable_thinking": True},
        "<think>\n ": {"reasoning_effort": "low"},
        " ": {"reasoning_effort": "none"},
        "  ": {"reasoning_effort": "high", "enable_thinking": False},
    }
    for end, extra in ends.items():
        prompt = rendered(each, prompt=True, **extra)
        assert prompt.endswith("<|im_start|>assistant\n" + end.strip(" "))


def test_thoughts_of_earlier_answers_are_not_shown_again():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nHello!"},
    ]
    assert "Well" not in rendered(Dialog(messages))
    assert "assistant\nHello!<|im_end|>" in rendered(Dialog(messages))


@pytest.mark.parametrize("kind", ["tool call", "tool turns"])
def test_calls_are_read_as_they_are_meant(kind: str):
    for each in both(kind):
        last = each.messages[-1]
        meant = [call["function"] for call in last.get("tool_calls", ())]
        found = split(each)
        assert [(name, json.loads(text)) for name, text in found.calls] == [
            (call["name"], call["arguments"]) for call in meant
        ]
        assert found.reasoning == each.reasoning
        assert found.content == last["content"]


@pytest.mark.parametrize("kind", ["tool call", "tool result", "tool turns"])
def test_calls_fit_their_schemas_and_say_what_the_user_said(kind: str):
    for each in both(kind):
        assert calls(each)
        for name, arguments, question in calls(each):
            schema = functions(each)[name]
            jsonschema.validate(arguments, schema)
            assert set(arguments) <= set(schema["properties"])
            for value in arguments.values():
                assert str(value) in question


def test_names_of_what_is_called_keep_to_their_side_of_the_split():
    for held, dialogs in ((False, trained("tool call")), (True, held_dialogs("tool call", COUNT))):
        for each in dialogs:
            for name, _, _ in calls(each):
                schema = functions(each)[name]
                names = list(schema["properties"])
                # The schema may list its parameters in alphabetical order.
                if len(names) > 1 and names == sorted(names):
                    continue
                assert is_held(f"{name}({','.join(names)})") == held


def test_answers_contain_every_result():
    for each in both("tool result"):
        answer = each.messages[-1]["content"]
        for message in each.messages:
            if message["role"] != "tool":
                continue
            try:
                result = json.loads(message["content"])
            except ValueError:
                result = message["content"].rstrip(".").removeprefix("Error: ")
                result = result.removeprefix("error: ")
            values = result.values() if isinstance(result, dict) else [result]
            for value in values:
                said = value if isinstance(value, str) else json.dumps(value)
                assert said in answer


def test_without_a_fitting_tool_none_is_called():
    kinds = set()
    for each in both("no tool"):
        assert each.tools
        found = split(each)
        assert not found.calls
        assert found.content == each.messages[-1]["content"]
        kinds.add(found.content == NO_TOOL)
    assert kinds == {True, False}


def test_json_holds_what_the_text_says():
    num_values = 0
    for each in both("JSON"):
        prompt = "\n".join(message["content"] for message in each.messages[:-1])
        for key, value in json.loads(split(each).content).items():
            assert key in prompt
            assert value is None or str(value) in prompt
            num_values += value is not None
    assert num_values > COUNT


def test_of_json_whose_keys_are_in_the_prompt_the_values_are_learned():
    for each in trained("JSON values"):
        learned = [text for text, is_learned in segments_of(each) if is_learned]
        values = json.loads(each.messages[-1]["content"]).values()
        assert learned == [*map(str, values), "<|im_end|>"]
        for value in values:
            assert str(value) in each.messages[-2]["content"]


def test_thoughts_are_right_and_lead_to_the_answer():
    for each in held_dialogs("thinking", 3 * COUNT) + list(trained("thinking", 3 * COUNT)):
        found = split(each)
        assert found.reasoning == each.reasoning
        assert found.content == each.messages[-1]["content"]
        for a, sign, b, c in SUM.findall(each.reasoning):
            assert int(a) + (int(b) if sign == "+" else -int(b)) == int(c)
        for a, sign, b in COMPARISON.findall(each.reasoning.replace(" = ", " -> ")):
            assert {"<": int(a) < int(b), ">": int(a) > int(b), "=": a == b}[sign]
        if said := re.match(r"The answer is (\d+)\.", found.content):
            assert each.reasoning.endswith(f"= {said[1]}")


def expansions(template: str) -> set[str]:
    """Every way to write a phrasing, without marks."""
    found = CHOICE.search(template)
    if found is None:
        return {" ".join(re.findall(r"[\w{}+*<>-]+", template.lower()))}
    before, after = template[: found.start()], template[found.end() :]
    return set().union(*(expansions(before + each + after) for each in found[1].split("|")))


@pytest.mark.parametrize("table", ["requests.txt", "forms.txt", "puzzles.txt"])
def test_no_held_out_phrasing_is_one_of_training(table: str):
    for name, phrasings in read_sections(table).items():
        held = set().union(*map(expansions, phrasings.held))
        trained = set().union(*map(expansions, phrasings.train))
        assert not held & trained, name


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_asks_what_training_does_not(kind: str):
    def key(each: Dialog) -> str:
        return json.dumps([each.messages[-2], each.tools, answer_text(each.messages[-1])])

    assert not {key(each) for each in held_dialogs(kind, 200)} & {
        key(each) for each in trained(kind, 2000)
    }
