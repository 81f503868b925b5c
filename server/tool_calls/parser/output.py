"""How deltas are joined: white space around delimiters, ids of calls, calls after the first."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Literal

from server.tool_calls.format_types import IdStyle
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.tool_calls.parser.parts import Part, Parts
from server.tool_calls.parser.source import TextSource

Kind = Literal["content", "reasoning", "call"]

BLANKS = " \t\r\n"
ALPHANUMERICS = string.ascii_letters + string.digits


def new_call_id(style: IdStyle, name: str, index: int) -> str:
    if style == "kimi":
        return f"functions.{name}:{index}"
    length, before = (9, "") if style == "mistral" else (24, "call_")
    return before + "".join(secrets.choice(ALPHANUMERICS) for _ in range(length))


@dataclass(slots=True)
class ParserOutput:
    """The text of readers, joined to few deltas.

    White space next to a delimiter is dropped, and content (or reasoning) on both sides of one is
    joined by one line end.  All other text comes out as it is.
    """

    source: TextSource  # its `taken` is emptied whenever a text has become part of a delta
    ids: IdStyle
    max_calls: int
    num_calls: int = 0  # begun, those beyond max_calls included
    parts: Parts = field(default_factory=Parts)
    _deltas: list[Delta] = field(default_factory=list[Delta])
    _kind: Kind = "content"  # of the delta that is being joined
    _chunks: list[str] = field(default_factory=list[str])
    _begun: tuple[str, str] | None = None  # id and name, if it begins a call
    _blanks: list[str] = field(default_factory=list[str])  # white space before a delimiter, maybe
    _after_delimiter: bool = False
    _kinds_before: set[Kind] = field(default_factory=set[Kind])

    def text(self, kind: Literal["content", "reasoning"], text: str) -> None:
        """Add content or reasoning."""
        self.source.taken.clear()
        end = self.source.place
        if kind == "reasoning":  # white space between its delimiters, too
            self.parts.note(kind, end)
        if self._after_delimiter:
            text = text.lstrip(BLANKS)
            self.parts.note("mark", end - len(text))
            if not text:
                return
            self._after_delimiter = False
            if kind in self._kinds_before:
                text = "\n" + text
        solid = text.rstrip(BLANKS)
        if solid:
            self.parts.note(kind, end - (len(text) - len(solid)))
        else:
            self._blanks.append(text)
            return
        if self._kind != kind:
            self._finish_delta()
            self._kind = kind
        self._chunks += self._blanks
        self._chunks.append(solid)
        self._kinds_before.add(kind)
        self._blanks = [text[len(solid) :]] if len(solid) < len(text) else []

    def content(self, text: str) -> None:
        self.text("content", text)

    def reasoning(self, text: str) -> None:
        self.text("reasoning", text)

    def delimiter(self, part: Part = "call") -> None:
        """A delimiter was passed: white space before and after it goes."""
        self.source.taken.clear()
        self.parts.note(part, self.source.place)
        self._blanks = []
        self._after_delimiter = True

    def begin_call(self, name: str, id: str | None = None) -> None:
        self.delimiter()
        if self.num_calls < self.max_calls:
            self._finish_delta()
            self._kind = "call"
            self._begun = (id or new_call_id(self.ids, name, self.num_calls), name)
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add JSON text to the call that was begun last."""
        self.source.taken.clear()
        self.parts.note("call", self.source.place)
        if self.num_calls <= self.max_calls:
            self._chunks.append(text)

    def take(self, *, last: bool) -> list[Delta]:
        """The deltas since the last time; with `last`, what was held back, too."""
        if last and self._blanks:
            self.parts.note("content", self.source.place)
            self._chunks += self._blanks
            self._blanks = []
        self._finish_delta()
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _finish_delta(self) -> None:
        text = "".join(self._chunks)
        self._chunks = []
        if self._kind == "call":
            if text or self._begun:
                id, name = self._begun or (None, None)
                index = min(self.num_calls, self.max_calls) - 1
                self._deltas.append(ToolCallDelta(index, text, id, name))
                self._begun = None
        elif text:
            delta = ContentDelta(text) if self._kind == "content" else ReasoningDelta(text)
            self._deltas.append(delta)
