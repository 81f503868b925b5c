"""Text that comes in pieces, read by generators that pause where they need more.

A reader written as a generator says in its own order what it expects, and bare `yield`s until the
text is there.  What it has decided never depends on where one piece of text ended and the next
began, so neither does what it makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]  # returns T; each yield waits for more text
Sink = Callable[[str], None]

NO_SPACE = re.compile(r"[^ \t\r\n]")


def ignore(text: str) -> None:
    """A sink for what nobody needs."""


class Broken(Exception):
    """The text is not what was expected; it ends, or goes on at the first wrong character."""


class ParserMarks:
    """Words to look for in a text that may end within one of them."""

    def __init__(self, words: Sequence[str]) -> None:
        longest_first = sorted(set(words), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        self._first = re.compile(f"[{re.escape(''.join({word[0] for word in words}))}]")
        self._parts = {word[:length] for word in words for length in range(1, len(word))}
        self._window = len(longest_first[0]) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._whole.search(text, start)

    def settled(self, text: str, start: int) -> int:
        """Where the end of a text begins that may still become a word; len(text) if none."""
        for match in self._first.finditer(text, max(start, len(text) - self._window)):
            if text[match.start() :] in self._parts:
                return match.start()
        return len(text)


@cache
def marks(*words: str) -> ParserMarks:
    return ParserMarks(words)


class TextSource:
    """The text that has come and was not taken yet."""

    __slots__ = ("_half_word", "_pos", "_text", "ended", "taken")

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._half_word = False  # the text ends within a word that would have been right
        self.ended = False
        self.taken: list[str] = []  # what was taken and is not yet part of any delta

    def feed(self, text: str) -> None:
        self._text = self._text[self._pos :] + text
        self._pos = 0

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
        """Nothing is left and nothing will come."""
        return self.ended and self._pos == len(self._text)

    def cut_off(self) -> bool:
        """Nothing will come, and nothing is left but half a word that was looked for."""
        return self.exhausted() or (self.ended and self._half_word)

    def drop(self) -> None:
        """Give up what is left and what was taken."""
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
        while (yield from self.peek()):
            sink(self.take(len(self._text)))

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
        pieces: list[str] = []
        yield from self.copy(stop, pieces.append, limit)
        return "".join(pieces)

    def skip_space(self) -> Reader[str]:
        """Take blanks and line ends; the character after them, not taken."""
        yield from self.copy(NO_SPACE, ignore)
        return (yield from self.peek())

    def one_of(self, *words: str) -> Reader[str]:
        """Take the word of these that the text goes on with; "" if it is none of them.

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
        """Take `word`.  Raises Broken if the text goes on with something else."""
        if word and not (yield from self.one_of(word)):
            raise Broken

    def copy_until(self, words: ParserMarks, sink: Sink) -> Reader[str]:
        """Pass text on up to the first of the words, which is taken; "" at the end of the text."""
        while True:
            match = words.search(self._text, self._pos)
            if match is not None:
                end = match.start()
            else:
                end = len(self._text) if self.ended else words.settled(self._text, self._pos)
            if end > self._pos:
                sink(self.take(end))
            if match is not None:
                return self.take(match.end())
            if self.ended:
                return ""
            yield
