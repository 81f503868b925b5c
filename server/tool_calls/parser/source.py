"""Text that comes in chunks, read by generators that pause where they need more.

A reader is a generator that takes what it expects in order, and yields until the text is there.
Its decisions never depend on where one chunk of text ended and the next began, so neither does its
result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]  # returns T; each yield waits for more text
Sink = Callable[[str], None]

NO_SPACE = re.compile(r"[^ \t\r\n]")


def ignore(text: str) -> None:
    """A sink for text that is dropped."""


class UnexpectedText(Exception):
    """The text is not what was expected: it ends, or its next character is wrong."""


class Delimiters:
    """Words to search for in a text that may end within one of them."""

    def __init__(self, words: Sequence[str]) -> None:
        longest_first = sorted(set(words), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        self._first = re.compile(f"[{re.escape(''.join({word[0] for word in words}))}]")
        self._beginnings = {word[:length] for word in words for length in range(1, len(word))}
        self._window = len(longest_first[0]) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._whole.search(text, start)

    def partial_start(self, text: str, start: int) -> int:
        """Where the end of a text begins that may still become a word; len(text) if none."""
        for match in self._first.finditer(text, max(start, len(text) - self._window)):
            if text[match.start() :] in self._beginnings:
                return match.start()
        return len(text)


@cache
def delimiters(*words: str) -> Delimiters:
    return Delimiters(words)


@dataclass(slots=True)
class TextSource:
    """The text that has come and was not taken yet."""

    ended: bool = False
    limited: bool = False  # a limit or a stop string ended it: the model had more to say
    taken: list[str] = field(default_factory=list[str])  # and not yet part of any delta
    _text: str = ""
    _pos: int = 0
    _before: int = 0  # characters of the answer before `_text`
    _half_word: bool = False  # the text ends within a word that would have been right

    def feed(self, text: str) -> None:
        self._text = self._text[self._pos :] + text
        self._before += self._pos
        self._pos = 0

    @property
    def place(self) -> int:
        """How many characters of the answer were taken."""
        return self._before + self._pos

    def take(self, end: int) -> str:
        """The text up to place `end` of the buffer."""
        text = self._text[self._pos : end]
        self._pos = end
        self.taken.append(text)
        return text

    def take_one(self) -> str:
        """The character that `peek` saw."""
        return self.take(self._pos + 1)

    def exhausted(self) -> bool:
        """Whether all text has been taken and no more will come."""
        return self.ended and self._pos == len(self._text)

    def cut_off(self) -> bool:
        """Whether all that remains is half a word that was expected, and no text will come."""
        return self.exhausted() or (self.ended and self._half_word)

    def drop_half_word(self) -> None:
        """At the end of the text, give up half a word that was expected."""
        if self.ended and self._half_word:
            self.drop()

    def drop(self) -> None:
        """Give up what remains and what was taken."""
        self._pos = len(self._text)
        self.taken.clear()

    def peek(self) -> Reader[str]:
        """The next character, not taken; "" at the end of the text."""
        while self._pos == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._pos]

    def copy_all(self, sink: Sink) -> Reader[None]:
        """Pass on the text to its end."""
        while not self.exhausted():
            if self._pos < len(self._text):
                sink(self.take(len(self._text)))
            else:
                yield

    def copy(self, stop: re.Pattern[str], sink: Sink, limit: int = 1 << 62) -> Reader[None]:
        """Pass on what comes before the first match of a one-character pattern, up to `limit`."""
        while limit and (yield from self.peek()):
            match = stop.search(self._text, self._pos)
            end = min(match.start() if match else len(self._text), self._pos + limit)
            limit -= end - self._pos
            if end > self._pos:
                sink(self.take(end))
            if match is not None:
                return

    def read(self, stop: re.Pattern[str], limit: int = 1 << 62) -> Reader[str]:
        """What `copy` passes on, as one text."""
        chunks: list[str] = []
        yield from self.copy(stop, chunks.append, limit)
        return "".join(chunks)

    def skip_space(self) -> Reader[str]:
        """Take blanks and line ends; the character after them, not taken."""
        yield from self.copy(NO_SPACE, ignore)
        return (yield from self.peek())

    def one_of(self, *words: str) -> Reader[str]:
        """Take the word of these that comes next; "" if it is none of them.

        None of the words may begin another of them.
        """
        while True:
            rest = len(self._text) - self._pos
            waiting = False
            for word in words:
                if self._text.startswith(word, self._pos):
                    return self.take(self._pos + len(word))
                waiting |= rest < len(word) and word.startswith(self._text[self._pos :])
            if self.ended or not waiting:
                self._half_word |= waiting
                return ""
            yield

    def expect(self, word: str) -> Reader[None]:
        """Take `word`.  Raises UnexpectedText if something else comes next."""
        if word and not (yield from self.one_of(word)):
            raise UnexpectedText

    def copy_until(self, words: Delimiters, sink: Sink, *, take: bool = True) -> Reader[str]:
        """Pass text on up to the first of the words; "" at the end of the text.

        take  the word is taken, too
        """
        while True:
            match = words.search(self._text, self._pos)
            if match is not None:
                end = match.start()
            else:
                end = len(self._text) if self.ended else words.partial_start(self._text, self._pos)
            if end > self._pos:
                sink(self.take(end))
            if match is not None:
                return self.take(match.end()) if take else match[0]
            if self.ended:
                return ""
            yield
