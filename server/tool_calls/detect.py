"""Which formats a model writes, from the text of its chat template."""

# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines

from __future__ import annotations

from collections.abc import Iterable

from server.tool_calls.formats import (
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

# The first all of whose words the template has.  Marks of one format only stand before those that
# others use, too; Llama's own templates name the format in words that the model reads.
TOOL_RULES = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k2", ("<|im_system|>tool_declare",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("harmony", ("<|channel|>", "functions.")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("dictionary of argument name and its value",)),
)
REASONING_RULES = (
    ("harmony", ("<|channel|>",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process",)),
    ("seed_oss", ("<seed:think>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)
Rules = tuple[tuple[str, tuple[str, ...]], ...]


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


def _first(rules: Rules, text: str) -> str | None:
    return next((name for name, words in rules if all(word in text for word in words)), None)
