"""A process that tries grammars: `python -m server.constrained.grammar_worker`.

A grammar is a caller's input to a library of native code.  Here it may take too long or end the
process, and only its caller notices.  Requests and answers are lines of JSON on stdin and
stdout; the end of stdin ends the process.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct

from runtime.messages import MAX_LEXER_STATES
from server.constrained.grammar_text import GUIDANCE, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CHECK_SECONDS = 2.0  # of a core, for one grammar; those that are fit for use take milliseconds
BLAME_SECONDS = 1.5  # of them, after which the place of an error is as precise as it is known
MAX_MEMORY = 2 << 30  # bytes of address space
MAX_ERROR = 300  # characters
STEPS = 12  # bytes of an answer that a grammar is tried with
UNSATISFIABLE = "Unsatisfiable"  # the library's word for a schema that no value fits
CALLER_TEXTS = {  # how its messages begin -> what they mean to a caller
    "NoExtensionBias": "no text fulfils it",
    "Parser Error: Current row has": "too many things may come next at one place, such as optional "
    "properties of one object: make more of them required",
}
REGEX_ERROR = re.compile(r"regex parse error:.*^error: ([^\n]*)", re.DOTALL | re.MULTILINE)
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas
SHARED = ("$defs", "definitions", GUIDANCE)  # what a schema inside of another needs to be tried
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarCheckArgs(Struct, frozen=True):
    vocab_size: int
    special: dict[int, str]  # special tokens by id


class GrammarVerdict(Struct, frozen=True):
    grammar: str = ""  # for the engine
    error: str | None = None
    path: list[str | int] | None = None  # of the schema to blame, of Grammar.schemas or in one
    is_final: bool = True  # False: another attempt may have another one


class ByteTokenizer:
    """A tokenizer with a token for each byte: a grammar is tried without a vocabulary.

    The special tokens keep their ids, as a grammar may name them.
    """

    def __init__(self, start: GrammarCheckArgs) -> None:
        size = max(start.vocab_size, max(start.special, default=0) + 1)
        self.tokens = [b""] * (size + 257)
        for id, word in start.special.items():
            self.tokens[id] = word.encode()
        for byte in range(256):
            self.tokens[size + byte] = bytes([byte])
        self.eos_token_id = size + 256
        self.tokens[self.eos_token_id] = b"<end>"
        self.bos_token_id = None
        self.special_token_ids = [*start.special, self.eos_token_id]
        self.first = size

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self.first + byte for byte in raw]


class Checker:
    def __init__(self, start: GrammarCheckArgs) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        single = ByteTokenizer(start)
        self._tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(single))
        self._first_byte = single.first
        self._began = 0.0  # the check that is under way, in seconds of this process on a core
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def check(self, request: Grammar) -> GrammarVerdict:
        """Try a grammar, and find out which of its schemas is to blame if it cannot be used."""
        self._began = time.process_time()
        grammars = request.grammars
        if request.ebnf:
            try:
                grammars = [_translated(each) for each in grammars]
            except Exception as error:
                reason = f"it reads as GBNF and cannot be translated: {error}"
                return GrammarVerdict(error=reason[:MAX_ERROR])
        grammar = msgspec.json.encode({"grammars": grammars}).decode()
        error = self._error(grammar)
        if error is None:
            return GrammarVerdict(grammar)
        for param, schema in request.schemas:
            found = self._schema_error(schema)
            if found is not None:
                path, error = self._narrow(schema, found)
                return GrammarVerdict(error=error, path=[*param, *path])
        return GrammarVerdict(error=error)

    def _error(self, grammar: str) -> str | None:
        """Why the library cannot use a grammar.  It is tried with an answer's first bytes."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        for step in range(STEPS):
            possible = b"" if matcher.is_error() else matcher.compute_bitmask()
            if matcher.is_error():
                return plain(matcher.get_error())
            if matcher.is_stopped():
                return "it allows nothing but the empty text" if step == 0 else None
            token = self._least(possible)
            if token is None:
                return None if matcher.is_accepting() else "no text fulfils it"
            if (error := self._object_error(matcher, possible)) is not None:
                return error
            matcher.consume_token(token)
        return None

    def _object_error(self, matcher: LLMatcher, possible: bytes) -> str | None:
        """Why the library cannot use an object that may begin where another byte is tried."""
        brace = self._first_byte + ord("{")
        if not possible[brace >> 3] >> (brace & 7) & 1:
            return None
        other = matcher.deep_copy()
        other.consume_token(brace)
        if not other.is_error() and not other.is_stopped():
            other.compute_bitmask()
        return plain(other.get_error()) if other.is_error() else None

    def _least(self, possible: bytes) -> int | None:
        """The first byte that may come next, else the first special token, but not the end.

        White space comes after the other bytes: STEPS that indent a value try little of it.
        """
        bits = int.from_bytes(possible, "little") & ~(1 << self._tokenizer.eos_token)
        in_text = bits >> self._first_byte << self._first_byte
        visible = self._first_byte + ord(" ") + 1
        bits = bits >> visible << visible or in_text or bits
        return (bits & -bits).bit_length() - 1 if bits else None

    def _schema_error(self, schema: dict[str, Any]) -> str | None:
        grammar = {"grammars": [{"json_schema": schema}]}
        return self._error(msgspec.json.encode(grammar).decode())

    def _narrow(self, schema: dict[str, Any], error: str) -> tuple[list[str | int], str]:
        """The innermost schema that fails in the same way by itself."""
        shared = {key: schema[key] for key in SHARED if key in schema}
        path: list[str | int] = []
        node = schema
        while True:
            for step, inner in _inner(node):
                if time.process_time() - self._began > BLAME_SECONDS:
                    return path, error
                found = self._schema_error({**shared, **inner})
                if found is not None and (
                    found == error or found[:13] == error[:13] == UNSATISFIABLE
                ):
                    path, node, error = path + step, inner, found
                    break
            else:
                return path, error


def _translated(grammar: dict[str, Any]) -> dict[str, Any]:
    """A grammar in the library's own form, if it is written as GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = grammar.get("lark_grammar", "")
    return {**grammar, "lark_grammar": any_to_lark(text)} if GBNF_RULE.search(text) else grammar


def plain(error: str) -> str:
    """The library's message for a caller, without the grammar that it may quote."""
    for beginning, words in CALLER_TEXTS.items():
        if error.startswith(beginning):
            return words
    if found := REGEX_ERROR.search(error):  # behind a copy of the expression
        return f"a regular expression is wrong: {found[1]}"[:MAX_ERROR]
    return error.replace("<non-verbose/>", "").strip()[:MAX_ERROR]


def _inner(schema: dict[str, Any]) -> Iterator[tuple[list[str | int], dict[str, Any]]]:
    """The schemas inside a schema, one level down."""
    for key, value in schema.items():
        entries: Iterable[tuple[list[str | int], object]] = [([key], value)]
        if key in ("enum", "const", "default", "examples"):
            entries = []
        elif isinstance(value, list):
            entries = (([key, index], item) for index, item in enumerate(cast("list[Any]", value)))
        elif isinstance(value, dict) and key in MAPS:
            fields = cast("dict[str, Any]", value)
            entries = (([key, name], item) for name, item in fields.items())
        for path, item in entries:
            if isinstance(item, dict):
                yield path, cast("dict[str, Any]", item)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    line = stdin.readline()
    if not line:
        return
    checker = Checker(msgspec.json.decode(line, type=GrammarCheckArgs))
    stdout.write(b"\n")  # ready
    stdout.flush()
    for line in stdin:
        # Time on a core: whether a grammar is taken does not depend on what else runs.
        signal.setitimer(signal.ITIMER_PROF, CHECK_SECONDS)  # SIGPROF ends this process
        verdict = checker.check(msgspec.json.decode(line, type=Grammar))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(msgspec.json.encode(verdict) + b"\n")
        stdout.flush()


if __name__ == "__main__":
    main()
