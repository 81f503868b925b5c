"""How models write calls and thoughts: one row of a table for each format.

A section of calls begins with a mark and may end with one.  What stands between is written in one
of four styles, which server/tool_calls/parser/styles.py reads:

    object      {"name": "f", "arguments": {"a": 1}}         alone or in a list
    header      name, then the arguments as JSON             the head is a regular expression
    parameters  name, then each argument between marks       text, typed by the tool's schema
    python      f(a=1, b="x")                                alone or in a list

Harmony (gpt-oss) frames whole messages and has a reader of its own,
server/tool_calls/parser/harmony.py.
"""

# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeVar

Style = Literal["object", "header", "parameters", "python", "harmony"]
IdStyle = Literal["call", "mistral", "kimi"]


class UnknownFormat(ValueError):
    """There is no format of this name; the message lists those there are."""


@dataclass(frozen=True)
class ToolFormat:
    name: str
    style: Style
    opens: tuple[str, ...] = ()  # marks that begin a section; one of call_open may be among them
    close: str = ""  # ends a section; models forget it
    call_open: str = ""  # begins each call of a section
    call_close: tuple[str, ...] = ()  # what may follow the arguments, in this order
    bare: bool = False  # an answer may also begin with a call without a mark
    objects: bool = False  # header style: if a bracket follows the mark, it is object style
    head: re.Pattern[str] | None = None  # header style: group `name`, maybe `id`
    name_close: str = ""  # parameters style, as all below: follows the name of the function
    argument_open: str = ""
    key_close: str = ""
    value_open: tuple[tuple[str, bool], ...] = ()  # mark, and whether it says: this is a string
    value_close: str = ""
    trim_value: bool = False  # a line end after the key and one before the end mark are no value
    ids: IdStyle = "call"

    def marks(self) -> tuple[str, ...]:
        """All marks: special tokens within them must be part of the text."""
        words = (*self.opens, self.close, self.call_open, *self.call_close, *self.inner)
        return tuple(word for word in words if word)

    @property
    def inner(self) -> tuple[str, ...]:
        head = self.head.pattern.replace("\\", "") if self.head else ""
        values = (mark for mark, _ in self.value_open)
        return (
            head,
            self.name_close,
            self.argument_open,
            self.key_close,
            self.value_close,
            *values,
        )


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    opens: tuple[str, ...]  # the prompt ends with one, or the answer begins with one
    closes: tuple[str, ...]
    ended_by: tuple[str, ...] = ()  # marks of calls that also end it, for models that forget

    def marks(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the reasoning."""
        return prompt.rstrip().endswith(self.opens)

    def closed_after(self, prompt: str) -> bool:
        """Whether the reasoning is over where an answer to this prompt begins."""
        return prompt.rstrip().endswith(self.closes)


@dataclass(frozen=True)
class Formats:
    """What the answers of a model may hold beside content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def harmony(self) -> bool:
        """Answers are rows of messages."""
        return "harmony" in (
            self.tools.style if self.tools else "",
            self.reasoning.name if self.reasoning else "",
        )

    def marks(self) -> tuple[str, ...]:
        used = (self.tools, self.reasoning)
        return tuple(mark for each in used if each is not None for mark in each.marks())

    def needs_token(self, word: str) -> bool:
        """Whether this special token must be part of the text that an AnswerParser gets."""
        return any(word in mark for mark in self.marks())


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")

_TOOLS = (
    ToolFormat("hermes", "object", opens=("<tool_call>",), close="</tool_call>"),
    ToolFormat("granite", "object", opens=("<|tool_call|>",)),
    ToolFormat("nemotron_json", "object", opens=("<TOOLCALL>",), close="</TOOLCALL>"),
    ToolFormat("llama3_json", "object", opens=("<|python_tag|>",), bare=True),
    ToolFormat(
        "pythonic", "python", opens=("<|python_start|>",), close="<|python_end|>", bare=True
    ),
    ToolFormat("lfm2", "python", opens=("<|tool_call_start|>",), close="<|tool_call_end|>"),
    ToolFormat("olmo3", "python", opens=("<function_calls>",), close="</function_calls>"),
    ToolFormat(
        "mistral",
        "header",
        opens=("[TOOL_CALLS]",),
        objects=True,
        head=re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*"),
        ids="mistral",
    ),
    ToolFormat(
        "deepseek_v3",
        "header",
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        close="<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close=("```", "<｜tool▁call▁end｜>"),
        head=re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json\s*"),
    ),
    ToolFormat(
        "deepseek_v31",
        "header",
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        close="<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close=("<｜tool▁call▁end｜>",),
        head=re.compile(r"\s*(?P<name>[\w.-]+)<｜tool▁sep｜>\s*"),
    ),
    ToolFormat(
        "deepseek_v32",
        "parameters",
        opens=("<｜DSML｜function_calls>",),
        close="</｜DSML｜function_calls>",
        call_open='<｜DSML｜invoke name="',
        call_close=("</｜DSML｜invoke>",),
        name_close='">',
        argument_open='<｜DSML｜parameter name="',
        key_close='"',
        value_open=(('string="true">', True), ('string="false">', False)),
        value_close="</｜DSML｜parameter>",
    ),
    ToolFormat(
        "kimi_k2",
        "header",
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_close=("<|tool_call_end|>",),
        head=re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>\s*"
        ),
        ids="kimi",
    ),
    ToolFormat(
        "qwen3_coder",
        "parameters",
        opens=("<tool_call>", "<function="),
        close="</tool_call>",
        call_open="<function=",
        call_close=("</function>",),
        name_close=">",
        argument_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        trim_value=True,
    ),
    ToolFormat(
        "seed_oss",
        "parameters",
        opens=("<seed:tool_call>",),
        close="</seed:tool_call>",
        call_open="<function=",
        call_close=("</function>",),
        name_close=">",
        argument_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
    ),
    ToolFormat(
        "minimax_m2",
        "parameters",
        opens=("<minimax:tool_call>",),
        close="</minimax:tool_call>",
        call_open='<invoke name="',
        call_close=("</invoke>",),
        name_close='">',
        argument_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
        trim_value=True,
    ),
    ToolFormat(
        "glm45",
        "parameters",
        opens=("<tool_call>",),
        close="</tool_call>",
        argument_open="<arg_key>",
        key_close="</arg_key>",
        value_open=(("<arg_value>", False),),
        value_close="</arg_value>",
    ),
    ToolFormat("harmony", "harmony", opens=HARMONY_MARKS, call_close=HARMONY_ENDS),
)

_THINK = (("<think>",), ("</think>",))
_REASONING = (
    ReasoningFormat("think", *_THINK),
    ReasoningFormat("kimi_k2", *_THINK, ended_by=("<|tool_calls_section_begin|>",)),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat(
        "harmony", ("<|channel|>analysis<|message|>",), (*HARMONY_ENDS, *HARMONY_MARKS)
    ),
)

# By name; further names are those by which other servers know a format.
TOOL_FORMATS = {each.name: each for each in _TOOLS}
TOOL_FORMATS.update(qwen=TOOL_FORMATS["hermes"], openai=TOOL_FORMATS["harmony"])
REASONING_FORMATS = {each.name: each for each in _REASONING}
REASONING_FORMATS.update(
    dict.fromkeys(("qwen3", "deepseek_r1", "glm45", "minimax_m2"), REASONING_FORMATS["think"]),
    openai_gptoss=REASONING_FORMATS["harmony"],
)

F = TypeVar("F", ToolFormat, ReasoningFormat)


def tool_format(name: str) -> ToolFormat:
    """Raises UnknownFormat."""
    return _named("tool", name, TOOL_FORMATS)


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises UnknownFormat."""
    return _named("reasoning", name, REASONING_FORMATS)


def _named(kind: str, name: str, table: dict[str, F]) -> F:
    if name in table:
        return table[name]
    raise UnknownFormat(f"there is no {kind} format {name!r}: use one of {', '.join(table)}")
