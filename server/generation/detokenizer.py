"""Token ids -> text, a few at a time.

For any split of the ids, both classes return the text of decoding all ids at once, wherever the ids
spell whole characters.  They hold back what could be an incomplete character; `flush` returns it.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD = 32  # tokens whose text is not certain; a character has at most 4


class Detokenizer(Protocol):
    def feed(self, tokens: list[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """The text that was held back.  An incomplete character becomes U+FFFD."""
        ...


def byte_alphabet() -> dict[str, int]:
    """Which byte each printable character of a byte-level vocabulary stands for (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(rest)
    }


def byte_table(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token id of a byte-level tokenizer; unknown ids have none."""
    alphabet = byte_alphabet()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    table: list[bytes] = []
    for token in range(size):
        word = tokenizer.id_to_token(token) or ""
        # A word with any other character, such as an added token with a space, spells itself.
        spelled = all(char in alphabet for char in word)
        table.append(bytes(alphabet[char] for char in word) if spelled else word.encode())
    return table


class ByteDetokenizer:
    """For byte-level tokenizers: one table look-up a token and an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: list[bytes]) -> None:
        """`table` holds the bytes to print for each id: none for ids to skip."""
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, tokens: list[int]) -> str:
        table = self._table
        size = len(table)
        if len(tokens) == 1:
            token = tokens[0]
            return self._decode(table[token]) if token < size else ""
        return self._decode(b"".join([table[token] for token in tokens if token < size]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: decode a short window twice and take what the new tokens added.

    The window begins with tokens whose text was delivered, so that the decoder sees whether it is
    at the beginning of a text (some drop a leading space there).
    """

    __slots__ = ("_decode", "_delivered", "_old", "_skip_special", "_tokens")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, context: list[int]) -> None:
        """`context` are the prompt's last tokens; their text is not delivered."""
        self._decode = tokenizer.decode
        self._skip_special = skip_special
        self._tokens = list(context)
        self._old = len(context)
        self._delivered = self._text(self._tokens)

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=self._skip_special)

    def feed(self, tokens: list[int]) -> str:
        return "".join([self._step(token) for token in tokens])

    def _step(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text(self._tokens)
        new = text[len(self._delivered) :]
        full = len(self._tokens) >= self._old + MAX_HELD
        if full and not new:  # special tokens: the next word still begins behind those before them
            del self._tokens[self._old :]
        if not new or (text.endswith(REPLACEMENT) and not full):
            return ""
        # The next window begins with the tokens of this chunk, whose text is complete.
        del self._tokens[: self._old]
        self._old = len(self._tokens)
        self._delivered = self._text(self._tokens)
        return new

    def flush(self) -> str:
        text = self._text(self._tokens)
        new = text[len(self._delivered) :]
        self._tokens = []
        self._old = 0
        self._delivered = ""
        return new
