"""Harmony, the format of gpt-oss, read from its text: an answer is a sequence of messages.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The head of the first message has no <|start|>: the prompt ends with it.  The recipient may also
stand before the channel.  The delimiter that ends the answer is missing where it was a stop token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.tool_calls.formats import HARMONY_ENDS
from server.tool_calls.parser.calls import CallReader
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.parts import Part
from server.tool_calls.parser.source import Reader, TextSource, UnexpectedText, delimiters

BEGINNINGS = ("<|start|>", "<|channel|>")
HEAD_DELIMITERS = (*BEGINNINGS, "<|constrain|>", "<|message|>")
ANGLE = re.compile("<")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([\w.-]+)")
FUNCTIONS = "functions."
MAX_HEAD = 512  # characters


@dataclass(frozen=True, slots=True)
class HarmonyReader:
    """Reads the messages of an answer; without a CallReader calls are content."""

    source: TextSource
    output: ParserOutput
    calls: CallReader | None
    reasoning: bool  # whether analysis is reasoning; False: it is content
    within: bool  # the prompt ends with the head of an analysis message

    def answer(self) -> Reader[None]:
        source, output = self.source, self.output
        if self.within:
            output.delimiter("mark")
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
        self.source.taken[:] = [word]
        try:
            head = yield from self._head(word)
            recipient = RECIPIENT.search(head)
            to = recipient[1] if recipient else ""
            name = to.removeprefix(FUNCTIONS)
            # The model forgets the namespace at times; a tool of its own, such as python, has none.
            if self.calls is not None and name and (name != to or name in self.calls.tools):
                self.output.delimiter()
                return (yield from self._call(self.calls, name))
            self.output.delimiter("mark")
            channel = CHANNEL.search(head)
            is_reasoning = channel is not None and channel[1] == "analysis"
            return (yield from self._text(reasoning=is_reasoning))
        except UnexpectedText:
            if self.source.limited and self.source.cut_off():
                self.source.drop()
                self.output.delimiter("mark")
            elif self.calls is not None:
                self.calls.give_up()
            else:
                self.output.content("".join(self.source.taken))
            return ""

    def _head(self, word: str) -> Reader[str]:
        chunks = [word]
        length = 0
        while word != "<|message|>":
            text = yield from self.source.read(ANGLE, MAX_HEAD - length)
            length += len(text)
            word = yield from self.source.one_of(*HEAD_DELIMITERS)
            if not word:
                raise UnexpectedText
            chunks += (text, word)
        return "".join(chunks)

    def _text(self, *, reasoning: bool) -> Reader[str]:
        sink = self.output.reasoning if reasoning and self.reasoning else self.output.content
        word = yield from self.source.copy_until(delimiters(*HARMONY_ENDS, *BEGINNINGS), sink)
        return (yield from self._after(word, "mark"))

    def _call(self, calls: CallReader, name: str) -> Reader[str]:
        source = self.source
        yield from source.skip_space()
        word = yield from source.one_of(*HARMONY_ENDS)
        calls.begin(name)
        if word or (source.exhausted() and not source.limited):
            self.output.arguments("{}")
        else:
            yield from calls.arguments(self.output.arguments)
            yield from source.skip_space()
            word = yield from source.one_of(*HARMONY_ENDS, *BEGINNINGS)
        calls.inside = False
        return (yield from self._after(word, "call"))

    def _after(self, word: str, part: Part) -> Reader[str]:
        if word:
            self.output.delimiter(part)
        if word in HARMONY_ENDS:
            yield from self.source.skip_space()
            word = yield from self.source.one_of(*BEGINNINGS)
            self.output.delimiter(part)
        return word
