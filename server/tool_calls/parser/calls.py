"""CallReader: what the readers of all styles of calls share (styles.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.tool_calls.format_types import ToolFormat
from server.tool_calls.parser.literal import as_json, copy_value
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.source import Reader, Sink, TextSource, UnexpectedText
from server.tool_calls.parser.values import Schema, decoded


@dataclass(slots=True)
class CallReader:
    """The calls of one answer: their source and output, and whether one is unfinished."""

    format: ToolFormat  # for_parser
    source: TextSource
    output: ParserOutput
    tools: Mapping[str, Schema]  # parameters of the functions that may be called
    inside: bool = False  # a call was begun and has not ended
    certain: bool = False  # it is a call: there was a delimiter, or the name of one that is offered

    def may_start(self, char: str) -> bool:
        """Whether an answer that begins with this character may be a call without a delimiter."""
        first = "{" if self.format.style == "object" else "["
        return self.format.bare and char == first

    def begin(self, name: str, id: str | None = None, arguments: str = "") -> None:
        """Begin a call; `arguments` are those that were read before its name."""
        self.inside = True
        self.output.begin_call(name, id)
        self.output.arguments(arguments)

    def end(self) -> None:
        self.inside = False
        self.output.delimiter()

    def ends_with(self, name: str) -> bool:
        """Whether the answer ends with a call of this function, behind its name."""
        return not self.source.limited and name in self.tools

    def arguments(self, sink: Sink) -> Reader[None]:
        """Read an object of arguments, {} for null and "".  One inside a string is unpacked."""
        source = self.source
        char = yield from source.peek()
        if char in ('"', "'", "n", "N"):
            chunks: list[str] = []
            yield from self.value(chunks.append, sink)
            text = "".join(chunks)
            inside = decoded(text) if text[0] == '"' else ""
            inner = as_json(inside) if inside.strip() else "{}"
            sink(inner if inner is not None and inner[0] == "{" else text)
        else:
            yield from self.value(sink, sink)

    def value(self, sink: Sink, rest: Sink) -> Reader[None]:
        """Read one value; `rest` gets what was held back if the answer ends within it."""
        try:
            yield from copy_value(self.source, sink)
        except UnexpectedText:
            if self.source.exhausted():
                rest("".join(self.source.taken))
            raise

    def give_up(self) -> None:
        """After UnexpectedText: what is no call is content, except half a delimiter at the end, and
        the beginning of a call that a limit has cut off."""
        begun = self.inside or (self.certain and self.source.limited)
        if begun and self.source.cut_off():
            self.source.drop()
            self.output.delimiter()
        else:
            self.output.content("".join(self.source.taken))
        self.inside = self.certain = False

    def check(self, delimiter: str, name: str) -> None:
        """Raises UnexpectedText without a name, or without a delimiter if it was not offered."""
        if not name or (not delimiter and name not in self.tools):
            raise UnexpectedText
        self.certain = True
