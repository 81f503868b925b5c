"""AnswerParser: an answer's text, as it streams, into content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping

from server.tool_calls.format_types import Formats, ReasoningFormat, ToolFormat
from server.tool_calls.parser.calls import CallReader
from server.tool_calls.parser.deltas import Delta
from server.tool_calls.parser.harmony import HarmonyReader
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.parts import Parts
from server.tool_calls.parser.source import Reader, TextSource, UnexpectedText, delimiters
from server.tool_calls.parser.styles import read_section
from server.tool_calls.parser.values import Schema


class AnswerParser:
    """Splits one answer.  However its text is cut, the deltas join to the same whole.

    - White space around delimiters is dropped; content before and after calls is joined by one line
      end.  An answer without delimiters comes out as it is.
    - Reasoning begins at the start of an answer only, and what looks like calls in it is reasoning.
    - A call goes out from the moment its name is certain.  Text that only began like a call is
      content, unless a limit cut it off there.  If a call's arguments stop being JSON, they end
      there and the rest is content; if the answer ends within them, they end there, too.
    - Arguments are one JSON object, as the model wrote it where it wrote JSON.
    """

    __slots__ = ("_calls", "_opens", "_output", "_reader", "_reasoning", "_source", "_within")

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        *,
        tools: Mapping[str, Schema],
        starts_in_reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        """
        tool_format         None if no tools may be called: then delimiters of calls are content
        tools               function names and their parameters' JSON schemas
        starts_in_reasoning the prompt ends within it: ReasoningFormat.open_after(prompt)
        parallel            False: calls after the first are dropped
        """
        self._source = TextSource()
        ids = "call" if tool_format is None else tool_format.ids
        self._output = ParserOutput(self._source, ids, 1 << 62 if parallel else 1)
        self._reasoning = reasoning_format
        self._within = starts_in_reasoning
        self._calls: CallReader | None = None
        self._opens: tuple[str, ...] = ()
        if tool_format is not None:
            self._calls = CallReader(tool_format.for_parser, self._source, self._output, tools)
            self._opens = self._calls.format.opens
        if Formats(tool_format, reasoning_format).harmony:
            self._reader = HarmonyReader(
                self._source,
                self._output,
                self._calls,
                reasoning=reasoning_format is not None,
                within=starts_in_reasoning,
            ).answer()
        else:
            self._reader = self._answer()
        next(self._reader)

    @property
    def parts(self) -> Parts:
        """Of the text so far."""
        return self._output.parts

    @property
    def num_calls(self) -> int:
        """Calls begun so far; if there are any, a stop is for them."""
        return self._output.num_calls

    def feed(self, text: str) -> list[Delta]:
        """What this text adds."""
        if text:
            self._source.feed(text)
            next(self._reader)
        return self._output.take(last=False)

    def end(self, *, limited: bool = False) -> list[Delta]:
        """What was held back, once no text will come.  The parser is of no more use.

        limited   the model had more to say: what has begun like a call is no content
        """
        self._source.ended, self._source.limited = True, limited
        next(self._reader, None)
        return self._output.take(last=True)

    def _answer(self) -> Reader[None]:
        source, output = self._source, self._output
        yield from self._start()
        opens = delimiters(*self._opens) if self._opens else None
        while not source.exhausted():
            if opens is None:
                yield from source.copy_all(output.content)
            elif delimiter := (yield from source.copy_until(opens, output.content)):
                yield from self._section(delimiter)

    def _start(self) -> Reader[None]:
        """What may only stand at the start: reasoning, and a call without a delimiter."""
        source, output, format = self._source, self._output, self._reasoning
        if format is not None:
            yield from source.skip_space()
            opened = yield from source.one_of(*format.opens)
            if opened or self._within:
                output.delimiter("mark" if opened else "reasoning")
                yield from self._reason(format)
        char = yield from source.skip_space()
        if self._calls is not None and self._calls.may_start(char):
            yield from self._section("")
        output.content("".join(source.taken))

    def _reason(self, format: ReasoningFormat) -> Reader[None]:
        source, output = self._source, self._output
        ended_by = () if self._calls is None else format.ended_by
        word = yield from source.copy_until(delimiters(*format.closes, *ended_by), output.reasoning)
        if word:
            output.delimiter("mark")
        if word in ended_by:
            source.taken.append(word)
            yield from self._section(word)

    def _section(self, delimiter: str) -> Reader[None]:
        """Read calls; what is no call is content."""
        assert self._calls is not None
        self._calls.certain = bool(delimiter)
        try:
            yield from read_section(self._calls, delimiter)
        except UnexpectedText:
            self._calls.give_up()
