"""The fields of a format: how a model delimits tool calls and reasoning in its text."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

Style = Literal["object", "header", "parameters", "python", "harmony"]
IdStyle = Literal["call", "mistral", "kimi"]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls, for parsing (`for_parser`) and for the grammars that enforce it
    (server/tool_calls/written_form.py).

    Delimiters are spelt as the model writes them. White space at their ends is written in a call
    that a grammar enforces, and optional in one that is parsed.
    """

    name: str
    style: Style
    opens: tuple[str, ...] = ()  # one of them begins a section; the first is written
    close: str = ""  # ends a section; models forget it
    call_open: str = ""  # begins each call of a section, and a section where `opens` has it
    call_close: tuple[str, ...] = ()  # what may follow the arguments, in this order
    bare: bool = False  # an answer may begin with a call without a delimiter; written so
    in_list: bool = False  # object and python style: calls are written in [ ]
    sections_joined_by: str | None = None  # written between two sections; None: only one
    arguments_key: str = "arguments"  # object style: as written; "parameters" is parsed, too
    name_open: str = ""  # header style
    name_close: str = ""  # header and parameters style: follows the name of the function
    head: re.Pattern[str] | None = None  # header style: from a call's start to its arguments, with
    # groups `name` and maybe `id`; None: name_open, the name, name_close
    objects: bool = False  # header style: a bracket behind `opens` begins object style, which is
    # written for a model whose template does not have `name_close`
    argument_open: str = ""  # parameters style, as all below
    key_close: str = ""
    value_open: tuple[tuple[str, bool], ...] = ()  # delimiter, and whether the value is a string
    value_close: str = ""
    trim_value: bool = False  # a line end at either end of a value is not part of it
    ids: IdStyle = "call"
    # A chat template is of this format if it has all of these words (): the first of `opens`.
    template_has: tuple[str, ...] = ()
    or_template_has: str = ""  # or this one

    @cached_property
    def for_parser(self) -> ToolFormat:
        """The same format, its delimiters without white space at their ends, with a `head`."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        stripped = {name: _stripped(value) for name, value in values.items()}
        if self.style == "header" and self.head is None:
            before, after = _lax(self.name_open), _lax(self.name_close.rstrip())
            stripped["head"] = re.compile(rf"\s*{before}(?P<name>[\w.-]+){after}\s*")
        return replace(self, **stripped)

    def delimiters(self) -> tuple[str, ...]:
        """All delimiters: special tokens within them must be part of the text that is parsed."""
        its = self.for_parser
        head = "" if its.head is None else its.head.pattern.replace("\\", "")
        value_opens = (text for text, _ in its.value_open)
        texts = (*its.opens, its.close, its.call_open, *its.call_close, head, its.name_close)
        texts += (its.argument_open, its.key_close, its.value_close, *value_opens)
        return tuple(text for text in texts if text)

    def is_of(self, template: str) -> bool:
        """Whether the source of a chat template is one of a model that writes this format."""
        return _has(template, self.template_has or self.for_parser.opens[:1], self.or_template_has)


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    opens: tuple[str, ...]  # the prompt ends with one, or the answer begins with one
    closes: tuple[str, ...]
    ended_by: tuple[str, ...] = ()  # delimiters of calls that also end it, where models forget
    # A chat template is of this format if it has all of these words (): the first of `opens`.
    template_has: tuple[str, ...] = ()
    or_template_has: str = ""  # or this one

    def delimiters(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def is_of(self, template: str) -> bool:
        """Whether a chat template and the vocabulary are those of a model that writes this."""
        return _has(template, self.template_has or self.opens[:1], self.or_template_has)

    def open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the reasoning."""
        return prompt.rstrip().endswith(self.opens)

    def closed_after(self, prompt: str) -> bool:
        """Whether the reasoning is over where an answer to this prompt begins."""
        return prompt.rstrip().endswith(self.closes)


@dataclass(frozen=True)
class Formats:
    """What the answers of a model may hold besides content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def harmony(self) -> bool:
        """Whether answers are sequences of harmony's messages."""
        return "harmony" in (
            self.tools.style if self.tools else "",
            self.reasoning.name if self.reasoning else "",
        )

    def delimiters(self) -> tuple[str, ...]:
        used = (self.tools, self.reasoning)
        return tuple(text for each in used if each is not None for text in each.delimiters())

    def needs_token(self, word: str) -> bool:
        """Whether this special token must be part of the text that an AnswerParser gets."""
        return any(word in text for text in self.delimiters())


def _stripped(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, tuple):
        return tuple(map(_stripped, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value


def _lax(text: str) -> str:
    """A regular expression for the text, in which white space is optional."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))


def _has(template: str, words: tuple[str, ...], other: str) -> bool:
    return all(word in template for word in words) or (other != "" and other in template)
