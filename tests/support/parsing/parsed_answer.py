"""What an AnswerParser makes of a text, joined so that two of them can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from server.tool_calls.formats import NONE, detect
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "wind": {"type": "number"},
            "options": {"type": "object"},
            "hours": {"type": "array"},
            "note": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


class Split(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments


def parser(tools: str | None, reasoning: str | None, **options: Any) -> AnswerParser:
    formats = detect(None, tools=tools or NONE, reasoning=reasoning or NONE)
    return AnswerParser(formats.tools, formats.reasoning, tools=TOOLS, **options)


def joined(deltas: Iterable[Delta]) -> Split:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        elif delta.id is not None:
            assert delta.index == len(calls)
            assert delta.name
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1
            assert delta.name is None
            name, arguments = calls[-1]
            calls[-1] = name, arguments + delta.arguments
    return Split(content, reasoning, tuple(calls))


def split_chunks(
    chunks: Iterable[str],
    tools: str | None,
    reasoning: str | None = None,
    *,
    limited: bool = False,
    **options: Any,
) -> Split:
    """What the chunks of one answer are split into."""
    machine = parser(tools, reasoning, **options)
    deltas = [delta for chunk in chunks for delta in machine.feed(chunk)]
    return joined(deltas + machine.end(limited=limited))
