"""JSON, or Python's literals, copied as JSON while they come.

JSON comes out byte for byte.  Python's quotes, names and tuples are translated, and so is what
models get wrong most: line ends and stray backslashes inside strings, a comma before a bracket,
keys without quotes.  What is neither JSON nor can be made JSON is UnexpectedText.
"""

from __future__ import annotations

import json
import re

import orjson

from server.tool_calls.parser.source import NO_SPACE, Reader, Sink, TextSource, UnexpectedText

CLOSERS = {"{": "}", "[": "]", "(": ")"}
AS_JSON = {"{": "{", "[": "[", "(": "[", "}": "}", "]": "]", ")": "]"}
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS.update({"True": "true", "False": "false", "None": "null"})
SCALAR_END = re.compile(r"[^A-Za-z0-9_.+-]")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
LOOSE_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")
MAX_SCALAR = 4096  # characters
MAX_KEY = 256

# Where a string stops that can be copied as it is.
PLAIN_END = {'"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"""['"\\\x00-\x1f]""")}
JSON_ESCAPES = frozenset('"\\/bfnrt')
HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
NO_HEX = re.compile(r"[^0-9a-fA-F]")


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text within a JSON string; those of text chunks, joined, are that of the whole text."""
    return quoted(text)[1:-1]


def as_json(text: str) -> str | None:
    """A whole literal as JSON; None if it is none."""
    try:
        orjson.loads(text)  # a hundred times as fast, and what is JSON stays as it is
        return text.strip()
    except orjson.JSONDecodeError:
        pass
    source = TextSource()
    source.feed(text)
    source.ended = True
    chunks: list[str] = []
    try:
        for _ in copy_value(source, chunks.append):
            raise AssertionError("nothing to wait for")
    except UnexpectedText:
        return None
    return "".join(chunks) if source.exhausted() else None


def copy_value(source: TextSource, sink: Sink) -> Reader[None]:
    """Copy one value as JSON, from its first character to its last.  Raises UnexpectedText."""
    closers: list[str] = []  # of the brackets that are open; as deep as a model likes
    while True:
        char = yield from source.peek()
        if char in CLOSERS:
            sink(AS_JSON[source.take_one()])
            closers.append(CLOSERS[char])
            yield from source.copy(NO_SPACE, sink)
            if (yield from source.peek()) != closers[-1]:
                if char == "{":
                    yield from _copy_key(source, sink)
                continue
            sink(AS_JSON[source.take_one()])
            closers.pop()
        elif char in PLAIN_END:
            yield from copy_string(source, sink)
        else:
            sink(_scalar((yield from source.read(SCALAR_END, MAX_SCALAR))))
        while closers:
            if (yield from _another(source, closers[-1], sink)):
                if closers[-1] == "}":
                    yield from _copy_key(source, sink)
                break
            sink(AS_JSON[source.take_one()])
            closers.pop()
        else:
            return


def _another(source: TextSource, closer: str, sink: Sink) -> Reader[bool]:
    """After a value inside brackets: does another follow?  A comma too many is dropped."""
    gap = yield from source.read(NO_SPACE)
    if (yield from source.one_of(",")):
        after = yield from source.read(NO_SPACE)
        if (yield from source.peek()) != closer:
            sink(f"{gap},{after}")
            return True
        gap += after
    elif (yield from source.peek()) != closer:
        raise UnexpectedText
    sink(gap)
    return False


def _copy_key(source: TextSource, sink: Sink) -> Reader[None]:
    if (yield from source.peek()) in PLAIN_END:
        yield from copy_string(source, sink)
    else:
        word = yield from source.read(SCALAR_END, MAX_KEY)
        if not word:
            raise UnexpectedText
        sink(quoted(word))
    yield from source.copy(NO_SPACE, sink)
    yield from source.expect(":")
    sink(":")
    yield from source.copy(NO_SPACE, sink)


def _scalar(word: str) -> str:
    if NUMBER.fullmatch(word):
        return word
    if word in WORDS:
        return WORDS[word]
    match = LOOSE_NUMBER.fullmatch(word)
    if match is None or not (match[2] or match[3]):
        raise UnexpectedText
    sign, whole, fraction, exponent = match.groups(default="")
    whole = whole.lstrip("0") or "0"
    point = f".{fraction or 0}" if match[3] is not None else ""
    return f"{sign.strip('+')}{whole}{point}{exponent}"


def copy_string(source: TextSource, sink: Sink) -> Reader[None]:
    """Copy a string in either quotes as a JSON string.  Raises UnexpectedText without an end."""
    quote = source.take_one()
    sink('"')
    while True:
        yield from source.copy(PLAIN_END[quote], sink)
        char = yield from source.peek()
        if not char:
            raise UnexpectedText
        source.take_one()
        if char == quote:
            sink('"')
            return
        if char == "\\":
            yield from _copy_escape(source, sink)
        else:
            sink(escaped(char))


def _copy_escape(source: TextSource, sink: Sink) -> Reader[None]:
    char = yield from source.peek()
    if not char:
        raise UnexpectedText
    if char in JSON_ESCAPES:
        sink("\\" + source.take_one())
    elif char in "'\n":  # Python's quote, and its way to go on in the next line
        source.take_one()
        sink("'" if char == "'" else "")
    elif char in HEX_LENGTHS:
        source.take_one()
        digits = yield from source.read(NO_HEX, HEX_LENGTHS[char])
        sink(_hex_escape(char, digits))
    else:  # a backslash that was not doubled
        sink("\\\\")


def _hex_escape(kind: str, digits: str) -> str:
    if len(digits) == HEX_LENGTHS[kind]:
        if kind == "u":
            return f"\\u{digits}"
        code = int(digits, 16)
        if code < 0xD800 or 0xDFFF < code <= 0x10FFFF:
            return escaped(chr(code))
    return f"\\\\{kind}{digits}"
