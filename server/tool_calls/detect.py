"""Which formats a model writes: by the text of its chat template, or by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from server.tool_calls.format_types import Formats, ReasoningFormat, ToolFormat
from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS

AUTO = "auto"
NONE = "none"
F = TypeVar("F", ToolFormat, ReasoningFormat)


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
        _chosen("tool", tools, TOOL_FORMATS, source),
        _chosen("reasoning", reasoning, REASONING_FORMATS, words),
    )


def _chosen(kind: str, name: str, table: dict[str, F], source: str) -> F | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in table.values() if each.is_of(source)), None)
    if name in table:
        return table[name]
    raise UnknownFormat(f"there is no {kind} format {name!r}: use one of {', '.join(table)}")
