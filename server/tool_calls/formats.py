"""How models write tool calls and reasoning: one row of a table for each format, and detection.

A section of calls begins with a delimiter and may end with one. The calls between them are written
in one of four styles, which server/tool_calls/parser/styles.py parses:

    object      {"name": "f", "arguments": {"a": 1}}           alone or in a list
    header      name, then the arguments as JSON               the head is a regular expression
    parameters  name, then each argument between delimiters    text, typed by the tool's schema
    python      f(a=1, b="x")                                  alone or in a list

Harmony (gpt-oss) frames whole messages and has a parser of its own,
server/tool_calls/parser/harmony.py.
"""

# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from server.tool_calls.format_types import Formats, ReasoningFormat, ToolFormat

AUTO = "auto"
NONE = "none"

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MISTRAL_ARGUMENTS = "[ARGS]"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_SECTION = "<|tool_calls_section_begin|>"

# A template's format is the first of which it has the words: a delimiter of one format only stands
# before those that others use, too. Llama's own templates describe the format to the model.
_TOOLS = (
    ToolFormat(
        "kimi_k2",
        "header",
        (_KIMI_SECTION, "<|tool_call_begin|>"),
        "<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_close=("<|tool_call_end|>",),
        name_open="functions.",
        name_close=f":0{_KIMI_ARGUMENTS}",
        head=re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*"
            rf"{re.escape(_KIMI_ARGUMENTS)}\s*"
        ),
        ids="kimi",
        or_template_has="<|im_system|>tool_declare",
    ),
    ToolFormat(
        "deepseek_v32",
        "parameters",
        ("<｜DSML｜function_calls>\n",),
        "</｜DSML｜function_calls>",
        call_open='<｜DSML｜invoke name="',
        call_close=("</｜DSML｜invoke>\n",),
        name_close='">\n',
        argument_open='<｜DSML｜parameter name="',
        key_close='" ',
        value_open=(('string="true">', True), ('string="false">', False)),
        value_close="</｜DSML｜parameter>\n",
        template_has=("｜DSML｜",),
    ),
    ToolFormat(
        "deepseek_v3",
        "header",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close=("\n```", "<｜tool▁call▁end｜>"),
        name_open="function<｜tool▁sep｜>",
        name_close="\n```json\n",
        template_has=("<｜tool▁sep｜>", "```json"),
    ),
    ToolFormat(
        "deepseek_v31",
        "header",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close=("<｜tool▁call▁end｜>",),
        name_close="<｜tool▁sep｜>",
        template_has=("<｜tool▁sep｜>",),
    ),
    ToolFormat(
        "minimax_m2",
        "parameters",
        ("<minimax:tool_call>\n",),
        "</minimax:tool_call>",
        call_open='<invoke name="',
        call_close=("</invoke>\n",),
        name_close='">\n',
        argument_open='<parameter name="',
        key_close='">',
        value_close="</parameter>\n",
        trim_value=True,
    ),
    ToolFormat(
        "seed_oss",
        "parameters",
        ("<seed:tool_call>\n",),
        "</seed:tool_call>",
        call_open="<function=",
        call_close=("</function>\n",),
        name_close=">\n",
        argument_open="<parameter=",
        key_close=">",
        value_close="</parameter>\n",
    ),
    ToolFormat(
        "glm45",
        "parameters",
        ("<tool_call>",),
        "</tool_call>",
        sections_joined_by="\n",
        name_close="\n",
        argument_open="<arg_key>",
        key_close="</arg_key>\n",
        value_open=(("<arg_value>", False),),
        value_close="</arg_value>\n",
        template_has=("<arg_key>",),
    ),
    ToolFormat(
        "harmony",
        "harmony",
        HARMONY_TOKENS,
        call_open="<|channel|>commentary to=functions.",
        call_close=HARMONY_ENDS,
        name_close=" <|constrain|>json<|message|>",
        template_has=("<|channel|>", "functions."),
    ),
    ToolFormat(
        "qwen3_coder",
        "parameters",
        ("<tool_call>\n", "<function="),
        "</tool_call>",
        call_open="<function=",
        call_close=("</function>\n",),
        sections_joined_by="\n",
        name_close=">\n",
        argument_open="<parameter=",
        key_close=">\n",
        value_close="\n</parameter>\n",
        trim_value=True,
        template_has=("<function=", "<parameter="),
    ),
    ToolFormat(
        "mistral",
        "header",
        ("[TOOL_CALLS]",),
        in_list=True,
        name_close=_MISTRAL_ARGUMENTS,
        head=re.compile(
            r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?"
            rf"(?:{re.escape(_MISTRAL_ARGUMENTS)})?\s*"
        ),
        objects=True,
        ids="mistral",
    ),
    ToolFormat("nemotron_json", "object", ("<TOOLCALL>",), "</TOOLCALL>", in_list=True),
    ToolFormat("lfm2", "python", ("<|tool_call_start|>",), "<|tool_call_end|>", in_list=True),
    ToolFormat("olmo3", "python", ("<function_calls>",), "</function_calls>"),
    ToolFormat("granite", "object", ("<|tool_call|>",), in_list=True),
    ToolFormat("hermes", "object", ("<tool_call>\n",), "\n</tool_call>", sections_joined_by="\n"),
    ToolFormat(
        "pythonic",
        "python",
        ("<|python_start|>",),
        "<|python_end|>",
        bare=True,
        in_list=True,
        or_template_has="[func_name1(",
    ),
    ToolFormat(
        "llama3_json",
        "object",
        ("<|python_tag|>",),
        bare=True,
        arguments_key="parameters",
        or_template_has="dictionary of argument name and its value",
    ),
)

_THINK = (("<think>",), ("</think>",))
_REASONING = (  # in the order in which a template is searched for their words
    ReasoningFormat(
        "harmony",
        ("<|channel|>analysis<|message|>",),
        (*HARMONY_ENDS, *HARMONY_TOKENS),
        levels=("low", "medium", "high"),
        template_has=("<|channel|>",),
    ),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        template_has=("Here is my thought process",),
    ),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        "kimi_k2", *_THINK, ended_by=(_KIMI_SECTION,), template_has=(_KIMI_SECTION, "</think>")
    ),
    ReasoningFormat("think", *_THINK, or_template_has="</think>"),
)

# By name; further names are those by which other servers know a format.
TOOL_FORMATS = {each.name: each for each in _TOOLS}
TOOL_FORMATS.update(qwen=TOOL_FORMATS["hermes"], openai=TOOL_FORMATS["harmony"])
REASONING_FORMATS = {each.name: each for each in _REASONING}
REASONING_FORMATS.update(
    dict.fromkeys(("qwen3", "deepseek_r1", "glm45", "minimax_m2"), REASONING_FORMATS["think"]),
    openai_gptoss=REASONING_FORMATS["harmony"],
)


class UnknownFormat(ValueError):
    """There is no format of this name; the message lists those there are."""


def detect(
    template: str | None,
    special_tokens: Iterable[str] = (),
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
) -> Formats:
    """The formats of a model's answers.

    template         the chat template's source; None if there is none
    special_tokens   of the vocabulary; those of reasoning may be there only
    tools, reasoning "auto", "none", or a format's name.  Raises UnknownFormat for others.
    """
    source = template or ""
    words = source + "\n" + "\n".join(special_tokens)
    return Formats(
        _select("tool", tools, TOOL_FORMATS, source),
        _select("reasoning", reasoning, REASONING_FORMATS, words),
    )


F = TypeVar("F", ToolFormat, ReasoningFormat)


def _select(kind: str, name: str, table: dict[str, F], source: str) -> F | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in table.values() if each.is_of(source)), None)
    if name in table:
        return table[name]
    raise UnknownFormat(f"there is no {kind} format {name!r}: use one of {', '.join(table)}")
