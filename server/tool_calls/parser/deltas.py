"""What an answer's text is split into: content, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ContentDelta(NamedTuple):
    text: str


class ReasoningDelta(NamedTuple):
    """Reasoning before the answer, without its delimiters."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Text of one call: the first delta has its id and name, all add to its arguments, JSON text.

    Or a whole call of a custom tool, whose input is no JSON.
    """

    index: int  # of the call in the answer
    arguments: str
    id: str | None = None
    name: str | None = None
    custom: bool = False


Delta = ContentDelta | ReasoningDelta | ToolCallDelta
