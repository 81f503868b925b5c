"""What the engine and its grammar process say to each other."""

from __future__ import annotations

from msgspec import Struct


class GrammarProcessArgs(Struct, frozen=True, kw_only=True):
    """What the engine says on stdin."""

    tokenizer_file: str
    vocab_size: int
    threads: int
    own_address: str
    engine_address: str


class Compile(Struct, frozen=True, array_like=True, tag="compile"):
    """Begin a sequence; answered by Compiled.  See SamplingParams for the fields."""

    key: int
    grammar: str
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class Advance(Struct, frozen=True, array_like=True, tag="advance"):
    """Tokens that were committed, one a sequence; answered by Advanced."""

    tokens: list[tuple[int, int]]  # key, token


class Free(Struct, frozen=True, array_like=True, tag="free"):
    keys: list[int]


class Compiled(Struct, frozen=True, array_like=True, tag="compiled"):
    key: int
    mask: bytes = b""
    error: str | None = None
    internal: bool = False  # with error: the grammar is not to blame


class Advanced(Struct, frozen=True, array_like=True, tag="advanced"):
    """What may come next, in little-endian bits by token id; or that nothing may."""

    masks: dict[int, bytes]
    ended: list[int] = []  # the grammar is fulfilled and takes no more
    errors: dict[int, str] = {}


ToWorker = Compile | Advance | Free
FromWorker = Compiled | Advanced
