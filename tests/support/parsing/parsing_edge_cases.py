# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines
"""Answers with reasoning, and answers that only resemble calls."""

from __future__ import annotations

from tests.support.parsing.parsed_answer import Split
from tests.support.parsing.parsing_texts import (
    BONN,
    GLM_OSLO,
    HARMONY_CALL,
    HERMES_BONN,
    HERMES_OSLO,
    KIMI,
    NOW,
    OSLO,
    ParsingCase,
)

DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

REASONING = [
    ParsingCase("think", None, "think", "<think>\nhm\n</think>\n\nYes.", Split("Yes.", "hm")),
    ParsingCase(
        "opened by the prompt", None, "think", "hm\n</think>\n\nYes.", Split("Yes.", "hm"), True
    ),
    ParsingCase(
        "opened twice", None, "think", "\n<think>hm</think>Yes.", Split("Yes.", "hm"), True
    ),
    ParsingCase("empty", None, "think", "<think>\n\n</think>\n\nYes.", Split("Yes.")),
    ParsingCase("never ends", None, "think", "<think>hm, \n", Split("", "hm, \n")),
    ParsingCase("later in the answer", None, "think", "The <think> tag", Split("The <think> tag")),
    ParsingCase(
        "then calls",
        "hermes",
        "think",
        f"<think>\nMaybe {HERMES_OSLO}?\n</think>\n\n{HERMES_BONN}",
        Split("", f"Maybe {HERMES_OSLO}?", (BONN,)),
    ),
    ParsingCase(
        "glm45", "glm45", "think", f"\n<think>hm</think>\n{GLM_OSLO}", Split("", "hm", (OSLO,))
    ),
    ParsingCase("kimi", "kimi_k2", "kimi_k2", f"hm {KIMI}", Split("", "hm", (OSLO, BONN)), True),
    ParsingCase("seed", None, "seed_oss", "<seed:think>hm</seed:think>Yes.", Split("Yes.", "hm")),
    ParsingCase("mistral", "mistral", "mistral", "[THINK]hm[/THINK]Yes.", Split("Yes.", "hm")),
    ParsingCase(
        "granite",
        None,
        "granite",
        "Here is my thought process: hm.\nHere is my response: Yes.",
        Split("Yes.", "hm."),
    ),
    ParsingCase(
        "then a call without a delimiter",
        "llama3_json",
        "think",
        '<think>hm</think>{"name": "weather", "parameters": {"city": "Oslo"}}',
        Split("", "hm", (OSLO,)),
    ),
]

# Calls of a function without parameters, for which models write no arguments at all.
WITHOUT_ARGUMENTS = [
    ParsingCase(f"no arguments: {text}"[:60], tools, None, text, Split("", "", (NOW,) * number))
    for tools, text, number in (
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', 1),
        ("mistral", "[TOOL_CALLS]now[ARGS]", 1),
        ("mistral", "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]{}", 2),
        ("deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>now\n```json\n\n```{DEEPSEEK_END}", 1),
        ("deepseek_v31", f"{DEEPSEEK}now<｜tool▁sep｜>{DEEPSEEK_END}", 1),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
            2,
        ),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>", 1),
    )
]

# What only resembles a call, or ends too early.
BROKEN = [
    ParsingCase(f"broken: {text}"[:60], tools, None, text, Split(content, "", calls))
    for tools, text, content, calls in (
        ("hermes", "a\n<tool_call> b", "a\n<tool_call> b", ()),
        ("hermes", "a <tool_call>", "a <tool_call>", ()),
        ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", ()),
        ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', ()),
        ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', ()),
        ("hermes", f"<tool_call>x{HERMES_OSLO}", "<tool_call>x", (OSLO,)),
        ("hermes", f"<tool_call>\n{HERMES_OSLO}", "<tool_call>", (OSLO,)),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "Os',
            "",
            (("weather", '{"city": "Os'),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"exact": tr',
            "",
            (("weather", '{"exact": tr'),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": ?}}</tool_call>',
            "?}}</tool_call>",
            (("weather", '{"city": '),),
        ),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", ()),
        ("mistral", "[TOOL_CALLS]weather please", "[TOOL_CALLS]weather please", ()),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=days>\n1",
            "",
            (("weather", '{"days": 1'),),
        ),
        ("qwen3_coder", "<tool_call>\n<function=we", "<tool_call>\n<function=we", ()),
        ("glm45", "<tool_call>hello you</tool_call>", "<tool_call>hello you</tool_call>", ()),
        ("pythonic", "[weather(city", "[weather(city", ()),
        ("pythonic", "[weather(city=Oslo)]", "Oslo)]", (("weather", '{"city": '),)),
        ("harmony", "<|channel|>ana", "<|channel|>ana", ()),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}<|call|>", "{}", ()),
        (
            "harmony",
            f"{HARMONY_CALL}<|start|>assistant<|chan",
            "<|start|>assistant<|chan",
            (OSLO,),
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.now<|message|>{"a": ?}<|end|><|start|>assis',
            "?}<|end|><|start|>assis",
            (("now", '{"a": '),),
        ),
        (
            "llama3_json",
            '{"name": "weather", "parameters": 5}',
            '{"name": "weather", "parameters": 5}',
            (),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}, "x',
            "",
            (OSLO,),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": ?} <tool_call>{"na',
            '?} <tool_call>{"na',
            (("weather", '{"city": '),),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</func",
            "",
            (("weather", '{"city": "Oslo"'),),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=></function></tool_call>",
            "<tool_call><function=></function></tool_call>",
            (),
        ),
    )
]
