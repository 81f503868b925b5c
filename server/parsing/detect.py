"""Which formats a model writes, from the text of its chat template."""

# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines

from __future__ import annotations

import re
from collections.abc import Iterable

from server.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)

AUTO = "auto"
NONE = "none"

# The first whose pattern the template has.  Specific marks stand before those that others use, too.
TOOL_RULES = (
    ("kimi_k2", r"<\|tool_calls_section_begin\|>|<\|im_system\|>tool_declare"),
    ("deepseek_v32", "｜DSML｜"),
    ("deepseek_v3", "(?s)(?=.*<｜tool▁sep｜>).*```json"),
    ("deepseek_v31", "<｜tool▁sep｜>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("seed_oss", "<seed:tool_call>"),
    ("glm45", "<arg_key>"),
    ("harmony", r"(?s)(?=.*<\|channel\|>).*to=functions\."),
    ("qwen3_coder", "(?s)(?=.*<function=).*<parameter="),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("nemotron_json", "<TOOLCALL>"),
    ("lfm2", r"<\|tool_call_start\|>"),
    ("olmo3", "<function_calls>"),
    ("granite", r"<\|tool_call\|>"),
    ("hermes", "<tool_call>"),
    # Llama's own templates name the format in words that the model reads.
    ("pythonic", r"<\|python_start\|>|\[func_name1\("),
    ("llama3_json", r"<\|python_tag\|>|\"parameters\": dictionary of argument name"),
)
REASONING_RULES = (
    ("harmony", r"<\|channel\|>"),
    ("mistral", r"\[THINK\]"),
    ("granite", "Here is my thought process"),
    ("seed_oss", "<seed:think>"),
    ("kimi_k2", r"(?s)(?=.*<\|tool_calls_section_begin\|>).*</?think>"),
    ("think", "</?think>"),
)


def detect(
    template: str | None,
    special_tokens: Iterable[str] = (),
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
) -> Formats:
    """The formats of a model's answers.

    template        the chat template's source; None if there is none
    special_tokens  words of the vocabulary; marks of reasoning may be there only
    tools, reasoning "auto", "none", or a format's name.  Raises UnknownFormat for others.
    """
    source = template or ""
    words = source + "\n" + "\n".join(special_tokens)
    return Formats(_tools(source, tools), _reasoning(words, reasoning))


def _tools(source: str, wanted: str) -> ToolFormat | None:
    if wanted == NONE:
        return None
    if wanted != AUTO:
        return tool_format(wanted)
    found = _first(TOOL_RULES, source)
    return TOOL_FORMATS[found] if found else None


def _reasoning(words: str, wanted: str) -> ReasoningFormat | None:
    if wanted == NONE:
        return None
    if wanted != AUTO:
        return reasoning_format(wanted)
    found = _first(REASONING_RULES, words)
    return REASONING_FORMATS[found] if found else None


def _first(rules: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((name for name, pattern in rules if re.search(pattern, text)), None)
