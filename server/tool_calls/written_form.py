"""How calls are enforced: what a grammar puts around their arguments, by the format's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.tool_calls.format_types import ToolFormat


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
