"""The messages between the engine and its grammar process."""

from __future__ import annotations

from msgspec import Struct


class GrammarProcessArgs(Struct, frozen=True, kw_only=True):
    """The arguments of the grammar process, read from stdin."""

    tokenizer_file: str
    vocab_size: int
    threads: int
    own_address: str
    engine_address: str


class Compile(Struct, frozen=True, array_like=True, tag="compile"):
    """Start a sequence; answered by Compiled.  See SamplingParams for the fields."""

    key: int  # the request id
    grammar: str
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class Advance(Struct, frozen=True, array_like=True, tag="advance"):
    """Committed tokens of sequences, in order; each of these is answered in one Advanced."""

    tokens: list[tuple[int, list[int]]]  # key, tokens


class Free(Struct, frozen=True, array_like=True, tag="free"):
    key: int


class Compiled(Struct, frozen=True, array_like=True, tag="compiled"):
    key: int
    mask: bytes = b""
    error: str | None = None
    internal: bool = False  # with `error`: the grammar process failed, not the grammar


class Advanced(Struct, frozen=True, array_like=True, tag="advanced"):
    """The masks of the next tokens, little-endian bits by token id; or the end of a sequence."""

    masks: dict[int, bytes]
    ended: list[int] = []  # the grammar is complete and allows no further token
    errors: dict[int, str] = {}


ToGrammarProcess = Compile | Advance | Free
FromGrammarProcess = Compiled | Advanced
