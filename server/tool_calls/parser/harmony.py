"""Harmony, the format of gpt-oss, read from its text: an answer is a sequence of messages.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The head of the first message has no <|start|>: the prompt ends with it.  The recipient may also
stand before the channel.  The delimiter that ends the answer is missing where it was a stop token.
"""

from __future__ import annotations

import re

from server.tool_calls.formats import HARMONY_ENDS
from server.tool_calls.parser.calls import CallReader
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.source import Reader, TextSource, UnexpectedText, delimiters

BEGINNINGS = ("<|start|>", "<|channel|>")
HEAD_DELIMITERS = (*BEGINNINGS, "<|constrain|>", "<|message|>")
ANGLE = re.compile("<")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([\w.-]+)")
FUNCTIONS = "functions."
MAX_HEAD = 512  # characters


class HarmonyReader:
    """Reads the messages of an answer; without a CallReader calls are content."""

    def __init__(
        self,
        source: TextSource,
        output: ParserOutput,
        calls: CallReader | None,
        *,
        reasoning: bool,
        within: bool,
    ) -> None:
        """
        reasoning whether analysis is reasoning; False: it is content
        within    the prompt ends with the head of an analysis message
        """
        self._source = source
        self._output = output
        self._calls = calls
        self._reasoning_sink = output.reasoning if reasoning else output.content
        self._within = within

    def answer(self) -> Reader[None]:
        source, output = self._source, self._output
        if self._within:
            output.delimiter()
            word = yield from self._text(reasoning=True)
        else:
            yield from source.skip_space()
            word = yield from source.one_of(*BEGINNINGS, "<|message|>", "to=")
            if not word:
                output.content("".join(source.taken))
        while word or not source.exhausted():
            if not word:
                word = yield from source.copy_until(delimiters(*BEGINNINGS), output.content)
            if word:
                word = yield from self._message(word)

    def _message(self, word: str) -> Reader[str]:
        """Read a message whose head begins with `word`; returns the next one's delimiter, or ""."""
        self._source.taken[:] = [word]
        try:
            head = yield from self._head(word)
            self._output.delimiter()
            recipient = RECIPIENT.search(head)
            name = recipient[1] if recipient else ""
            is_call = name.startswith(FUNCTIONS) and name != FUNCTIONS
            if self._calls is not None and is_call:
                return (yield from self._call(self._calls, name.removeprefix(FUNCTIONS)))
            channel = CHANNEL.search(head)
            is_reasoning = channel is not None and channel[1] == "analysis"
            return (yield from self._text(reasoning=is_reasoning))
        except UnexpectedText:
            if self._calls is not None:
                self._calls.give_up()
            else:
                self._output.content("".join(self._source.taken))
            return ""

    def _head(self, word: str) -> Reader[str]:
        chunks = [word]
        length = 0
        while word != "<|message|>":
            text = yield from self._source.read(ANGLE, MAX_HEAD - length)
            length += len(text)
            word = yield from self._source.one_of(*HEAD_DELIMITERS)
            if not word:
                raise UnexpectedText
            chunks += (text, word)
        return "".join(chunks)

    def _text(self, *, reasoning: bool) -> Reader[str]:
        sink = self._reasoning_sink if reasoning else self._output.content
        word = yield from self._source.copy_until(delimiters(*HARMONY_ENDS, *BEGINNINGS), sink)
        return (yield from self._after(word))

    def _call(self, calls: CallReader, name: str) -> Reader[str]:
        source = self._source
        yield from source.skip_space()
        word = yield from source.one_of(*HARMONY_ENDS)
        calls.begin(name)
        if word:
            self._output.arguments("{}")
        else:
            yield from calls.arguments(self._output.arguments)
            yield from source.skip_space()
            word = yield from source.one_of(*HARMONY_ENDS, *BEGINNINGS)
        calls.inside = False
        return (yield from self._after(word))

    def _after(self, word: str) -> Reader[str]:
        if word:
            self._output.delimiter()
        if word in HARMONY_ENDS:
            yield from self._source.skip_space()
            word = yield from self._source.one_of(*BEGINNINGS)
            self._output.delimiter()
        return word
