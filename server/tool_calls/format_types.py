"""The fields of a format: how a model delimits tool calls and reasoning in its text.

`written_form` makes of them what a grammar puts around the arguments of calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

Style = Literal["object", "header", "parameters", "python", "harmony"]
IdStyle = Literal["call", "mistral", "kimi"]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls, for parsing (`for_parser`) and for grammars (`written_form`).

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
    levels: tuple[str, ...] = ()  # of reasoning_effort, if it is known which there are
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
        used = (self.tools, self.reasoning)
        return any(each is not None and each.name == "harmony" for each in used)

    def needs_token(self, word: str) -> bool:
        """Whether this special token must be part of the text that an AnswerParser gets."""
        used = (self.tools, self.reasoning)
        return any(word in text for each in used if each is not None for text in each.delimiters())


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


@dataclass(frozen=True)
class ArgumentForm:
    """The texts around an argument; KEY stands for its name."""

    text: str  # before a value that is text
    json: str  # before any other value
    json_end: str  # behind the value, before `close`; a text has it at its end, too
    close: str


@dataclass(frozen=True)
class CallForm:
    """A section of calls: opens, head, begin ARGUMENTS end, maybe comma and another call, close.

    NAME stands for the function's name.
    """

    opens: str  # in free text, a call must follow it
    begin: str  # from there, or from `head`, to the arguments
    end: str
    head: str = ""
    close: str = ""
    comma: str | None = None  # between two calls of a section; None: a section has one call
    between: str | None = None  # between two sections; None: an answer has one section
    # None: the arguments are one JSON object
    arguments: ArgumentForm | Literal["python"] | None = None
    named: bool = False  # in free text, `opens` counts only before a tool's name and bracket


def written_form(format: ToolFormat, template: str) -> CallForm:
    """How calls of a format are written; `template` is the chat template's source."""
    if format.style == "harmony":  # the token that ends a call ends the answer
        return CallForm(format.call_open, f"NAME{format.name_close}", "")
    if format.style == "object" or (format.objects and format.name_close not in template):
        return _object_form(format)
    if format.style == "python":
        return _python_form(format)
    end = "".join(format.call_close) + format.close
    if format.style == "header":
        opens = format.opens[0] + format.call_open
        return CallForm(opens, f"{format.name_open}NAME{format.name_close}", end)
    opens, space = _opens(format)
    return CallForm(
        opens,
        f"{space}{format.call_open}NAME{format.name_close}",
        end,
        between=format.sections_joined_by,
        arguments=_argument_form(format),
    )


def _opens(format: ToolFormat) -> tuple[str, str]:
    """What begins a section, and the white space behind it."""
    opens = format.opens[0].rstrip()
    return opens, format.opens[0].removeprefix(opens)


def _object_form(format: ToolFormat) -> CallForm:
    opens, space = _opens(format)
    first, last = ("[", "]") if format.in_list else ("", "")
    begin = f'{space}{first}{{"name": "NAME", "{format.arguments_key}": '
    if format.bare:
        opens, begin = begin.lstrip().split("NAME")
        begin = f"NAME{begin}"
    end = f"}}{last}{format.close}"
    return CallForm(opens, begin, end, between=format.sections_joined_by)


def _python_form(format: ToolFormat) -> CallForm:
    opens, space = _opens(format)
    first, last, comma = ("[", "]", ", ") if format.in_list else ("", "", "\n")
    head, close = space + first, last + format.close
    if format.bare:
        opens, head, close = first, "", last
    return CallForm(opens, "NAME(", ")", head, close, comma, arguments="python", named=format.bare)


def _argument_form(format: ToolFormat) -> ArgumentForm:
    key = f"{format.argument_open}KEY{format.key_close}"
    value_open = {says_string: text for text, says_string in format.value_open}
    of_json = value_open.get(False, "")
    close = format.value_close.lstrip()
    json_end = format.value_close[: -len(close)]
    return ArgumentForm(key + value_open.get(True, of_json), key + of_json, json_end, close)
