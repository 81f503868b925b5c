"""CallReader: what the readers of all styles of calls share
(server/tool_calls/parser/styles.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from server.tool_calls.format_types import ToolFormat
from server.tool_calls.parser.literal import as_json, copy_value
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.source import Broken, Reader, Sink, TextSource
from server.tool_calls.parser.values import Schema, decoded


class CallReader:
    """The calls of one answer: where they are read from and told to, and whether one goes on."""

    def __init__(
        self,
        format: ToolFormat,
        source: TextSource,
        output: ParserOutput,
        tools: Mapping[str, Schema],
    ) -> None:
        """`tools` are the parameter schemas of the functions that may be called."""
        self.format = format.for_parser
        self.inside = False  # a call was begun and has not ended
        self.source = source
        self.output = output
        self.tools = tools

    def may_start(self, char: str) -> bool:
        """Whether an answer that begins with this character may be a call without a mark."""
        first = "{" if self.format.style == "object" else "["
        return self.format.bare and char == first

    def begin(self, name: str, id: str | None = None) -> None:
        self.inside = True
        self.output.begin_call(name, id)

    def end(self) -> None:
        self.inside = False
        self.output.mark()

    def arguments(self, sink: Sink) -> Reader[None]:
        """Read an object of arguments, {} for null.  One inside a string is unpacked."""
        source = self.source
        char = yield from source.peek()
        if char in ('"', "'", "n", "N"):
            pieces: list[str] = []
            yield from self.value(pieces.append, sink)
            text = "".join(pieces)
            inner = as_json(decoded(text)) if text[0] == '"' else "{}"
            sink(inner if inner is not None and inner[0] == "{" else text)
        else:
            yield from self.value(sink, sink)

    def value(self, sink: Sink, rest: Sink) -> Reader[None]:
        """Read one value; `rest` gets what was held back if the answer ends within it."""
        try:
            yield from copy_value(self.source, sink)
        except Broken:
            if self.source.exhausted():
                rest("".join(self.source.taken))
            raise

    def give_up(self) -> None:
        """After Broken: what is no call is content, but for half a mark that ends an answer."""
        if self.inside and self.source.cut_off():
            self.source.drop()
        else:
            self.output.content("".join(self.source.taken))
        self.inside = False

    def check(self, mark: str, name: str) -> None:
        """Raises Broken if there is no name, or without a mark, if it was not offered."""
        if not name or (not mark and name not in self.tools):
            raise Broken
