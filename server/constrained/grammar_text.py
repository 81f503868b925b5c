"""A grammar as the library reads it, and texts as parts of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

TEXT = r"/(?s:.*)/"
# At each place one space, or a new line and its indentation: a model that is not sure how to
# continue writes white space for as long as it may.
WHITESPACE = r" |\r?\n( {0,32}|\t{0,16})"
GUIDANCE = "x-guidance"  # the key of a schema that holds the library's own options
Path = tuple[str | int, ...]  # a FieldPath, as msgspec reads it
SPECIAL_IN_REGEX = frozenset(r"\.+*?()|[]{}^$#&-~/")


class Grammar(Struct, frozen=True):
    """Grammars as the library reads them, the first of which is the answer's."""

    grammars: list[dict[str, Any]]
    # The schemas in it, each with the path of the request's field that it came from.
    schemas: list[tuple[Path, dict[str, Any]]] = []
    param: Path = ("structured_outputs",)  # named in an error if no schema is to blame
    ebnf: bool = False  # one of the grammars is written as GBNF


def with_whitespace(schema: dict[str, Any], pattern: str = WHITESPACE) -> dict[str, Any]:
    """A schema for the library, with the white space that may stand between its tokens."""
    return {**schema, GUIDANCE: {**schema.get(GUIDANCE, {}), "whitespace_pattern": pattern}}


def literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(
        [
            f"\\{char}" if char in SPECIAL_IN_REGEX
            else char if char.isprintable()
            else f"\\x{{{ord(char):x}}}"
            for char in text
        ]
    )  # fmt: skip


def escaped(regex: str) -> str:
    r"""A regular expression between the slashes of a grammar: / is \/ there, and a line ends."""
    chars: list[str] = []
    after_backslash = False
    for char in regex:
        quoted = {"/": "/", "\n": "n", "\r": "r"}.get(char, "")
        if quoted and not after_backslash:
            chars.append("\\")
        chars.append(quoted or char)
        after_backslash = char == "\\" and not after_backslash
    return "".join(chars)


class GrammarLiterals:
    """Literal texts in a grammar: special tokens in them can only be named by their ids."""

    def __init__(self, special: Mapping[int, str], added: Mapping[int, str] | None = None) -> None:
        """added: tokens that are no special ones and text in a grammar, but have one spelling"""
        self._added = {word: id for id, word in (added or {}).items()}
        self._ids = {word: id for id, word in special.items() if word}
        words = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, words))})") if words else None

    def of(self, text: str) -> str:
        """Exactly this text."""
        return " ".join(self._expressions(text))

    def is_token(self, text: str) -> bool:
        """Whether the text is one special token."""
        return text in self._ids

    def added_token(self, text: str) -> str | None:
        """The token of this text by its id, where it is an added one that is not special."""
        id = self._added.get(text)
        return None if id is None else f"<[{id}]>"

    def any_token_but(self, text: str) -> str:
        """Any special token, but not that of this text; "" if there is no other."""
        ids = [id for word, id in self._ids.items() if word != text]
        return f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""

    def whole_tokens(self, text: str, length: int) -> int:
        """How long a beginning of the text is that has `length` characters and splits no token."""
        end = 0
        for chunk in self._split(text):
            end += len(chunk)
            if end >= length:
                return end if chunk in self._ids else length
        return length

    def after(self, rule: str, text: str, regex: str = "(?s:.*)") -> str:
        """A rule of this name for what fits a regular expression, and this text behind it.

        A special token is reached by a token, all else by a lazy regular expression.
        """
        first, *others = self._expressions(text)
        rest = " ".join(others)
        if first.startswith("<["):
            return f"{rule}: /{regex}/ {first} {rest}".rstrip()
        return f"{rule}: {rule}_begun {rest}\n{rule}_begun[lazy]: /{regex}{first[1:-1]}/"

    def _expressions(self, text: str) -> list[str]:
        return [
            f"<[{self._ids[chunk]}]>" if chunk in self._ids else f"/{literal(chunk)}/"
            for chunk in self._split(text)
        ]

    def _split(self, text: str) -> list[str]:
        chunks = [text] if self._pattern is None else self._pattern.split(text)
        return [chunk for chunk in chunks if chunk]
