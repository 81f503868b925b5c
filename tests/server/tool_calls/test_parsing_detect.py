# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines
"""Formats are chosen by the chat template's text, and by name."""

import pytest

from server.tool_calls.format_types import Formats
from server.tool_calls.formats import NONE, REASONING_FORMATS, TOOL_FORMATS, UnknownFormat, detect
from tests.support.parsing.format_cases import FORMAT_CASES
from tests.support.parsing.parsing_cases import CASES
from tests.support.paths import ROOT

HERMES = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '</tools>\\nAnswer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
"""
THINKING = """
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
DEEPSEEK = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + %s + '<｜tool▁call▁end｜>' }}"

TEMPLATES = {
    "chatml": ("{{ '<|im_start|>' + message.role }}", None, None),
    "qwen2.5": (HERMES, "hermes", None),
    "qwen3": (HERMES + THINKING, "hermes", "think"),
    "llama3.1": (
        "{{ '<|python_tag|>' + call.name }} Respond in the format {\"name\": function name, "
        '"parameters": dictionary of argument name and its value}.',
        "llama3_json",
        None,
    ),
    "llama3.2": (
        '{{ \'use the format {"name": name, "parameters": dictionary of argument name and '
        "its value}' }}",
        "llama3_json",
        None,
    ),
    "llama4": ("write calls as [func_name1(param1=value1), func_name2()]", "pythonic", None),
    "magistral": (
        "{{ '[THINK]' }}{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}",
        "mistral",
        "mistral",
    ),
    "deepseek v3": (
        DEEPSEEK % "type + '<｜tool▁sep｜>' + name + '\\n```json\\n' + args + '\\n```'" + THINKING,
        "deepseek_v3",
        "think",
    ),
    "deepseek v3.1": (
        DEEPSEEK % "name + '<｜tool▁sep｜>' + args" + "{{ '</think>' }}",
        "deepseek_v31",
        "think",
    ),
    "deepseek v3.2": (
        "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}invoke>" + THINKING,
        "deepseek_v32",
        "think",
    ),
    "glm 4.5": (
        "{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>{{ '<think></think>' }}",
        "glm45",
        "think",
    ),
    "kimi k2": ("{{ '<|im_system|>tool_declare<|im_middle|>' }}", "kimi_k2", None),
    "kimi k2 thinking": (
        "<|tool_calls_section_begin|>{{ call.id }}<think></think>",
        "kimi_k2",
        "kimi_k2",
    ),
    "minimax m2": ("{% set open = '<minimax:tool_call>' %}<invoke><think>", "minimax_m2", "think"),
    "seed": ("<seed:tool_call><function=f><parameter=p><seed:think>", "seed_oss", "seed_oss"),
    "granite 3": ("{{ '<|tool_call|>' }} Here is my thought process:", "granite", "granite"),
    "nemotron": ("<TOOLCALL>[...]</TOOLCALL><think>", "nemotron_json", "think"),
    "gpt-oss": (
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}{{ 'functions.' + name }}",
        "harmony",
        "harmony",
    ),
    **{name: (case.template, name, None) for name, case in FORMAT_CASES.items() if case.template},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_formats_are_detected_from_the_template(name: str):
    template, tools, reasoning = TEMPLATES[name]
    found = detect(template)
    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning


def test_every_format_is_found_in_some_template():
    found = [detect(template) for template, _, _ in TEMPLATES.values()]
    assert {each.tools for each in found} == {None, *TOOL_FORMATS.values()}
    assert {each.reasoning for each in found} == {None, *REASONING_FORMATS.values()}


def test_without_a_template_there_are_no_formats():
    assert detect(None) == Formats(None, None)


def test_reasoning_is_also_found_in_the_vocabulary():
    found = detect("{{ messages }}", ["<think>", "</think>", "[TOOL_CALLS]"])
    assert found == Formats(None, REASONING_FORMATS["think"])


def test_a_named_format_wins_over_the_template():
    found = detect(HERMES + THINKING, tools="pythonic", reasoning="granite")
    assert found == Formats(TOOL_FORMATS["pythonic"], REASONING_FORMATS["granite"])
    assert detect(HERMES + THINKING, tools="none", reasoning="none") == Formats(None, None)


@pytest.mark.parametrize(
    ("kind", "asked", "table"),
    [
        ("tool", {"tools": "xml"}, TOOL_FORMATS),
        ("reasoning", {"reasoning": "xml"}, REASONING_FORMATS),
    ],
)
def test_an_unknown_format_is_refused_with_the_names_there_are(
    kind: str, asked: dict[str, str], table
):
    with pytest.raises(UnknownFormat) as caught:
        detect(None, **asked)
    assert f"no {kind} format 'xml'" in str(caught.value)
    assert all(name in str(caught.value) for name in table)


def test_the_prompt_decides_whether_the_answer_begins_in_reasoning():
    think = REASONING_FORMATS["think"]
    assert think.open_after("<|im_start|>assistant\n<think>\n")
    assert not think.open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.open_after("what does <think> mean?<|im_start|>assistant\n")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_special_tokens_of_an_answer_are_those_its_formats_need(case):
    special = [
        *("<|tool_call|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "[ARGS]", "[CALL_ID]", "｜DSML｜"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<tool_call>", "</tool_call>"),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "<seed:tool_call>"),
        *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>"),
    ]
    formats = detect(None, tools=case.tools or NONE, reasoning=case.reasoning or NONE)
    if case.split.calls or case.split.reasoning:
        outside = case.split.content + case.split.reasoning + str(case.split.calls)
        for word in special:
            if word in case.text and word not in outside:
                assert formats.needs_token(word), word
    assert not formats.needs_token("<|endoftext|>")


def test_the_documentation_has_every_format_and_no_other():
    text = (ROOT / "docs" / "formats.md").read_text("utf-8")
    _, calls, reasoning, *_ = text.split("\n## ")
    for section, table in ((calls, TOOL_FORMATS), (reasoning, REASONING_FORMATS)):
        rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        assert {name for row in rows for name in row.strip("| `").split("`, `")} == set(table)
