"""Readers of one section of calls, one for each style (server/tool_calls/formats.py).

Each is called behind the delimiter that opened the section and raises UnexpectedText where the text
is no call.  Nothing of a call becomes a delta before its name is certain; from then on its
arguments go out as they come.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from server.tool_calls.parser.calls import CallReader
from server.tool_calls.parser.literal import copy_string, copy_value, escaped, quoted
from server.tool_calls.parser.source import Reader, UnexpectedText, delimiters, ignore
from server.tool_calls.parser.values import STRING, argument_kinds, as_argument, decoded

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # a call without a delimiter has no keys besides these
NO_NAME = re.compile(r"[^\w.-]")
NO_IDENTIFIER = re.compile(r"\W")
KEY_END = re.compile(r'[<>"\n]')
MAX_HEAD = 512  # characters from the delimiter to the arguments
MAX_NAME = 256

ReadCall = Callable[[CallReader], Reader[None]]


def read_section(calls: CallReader, delimiter: str) -> Reader[None]:
    """Read a section behind the delimiter that opened it, "" for none, and the one that ends it.

    Raises UnexpectedText.
    """
    format, source = calls.format, calls.source
    in_objects = format.objects and (yield from source.skip_space()) in ("[", "{")
    if in_objects or format.style == "object":
        yield from _list(calls, delimiter, python=False)
    elif format.style == "python":
        yield from _list(calls, delimiter, python=True)
    else:
        yield from _each(calls, delimiter, READ_CALL[format.style])
    yield from source.skip_space()
    if not (yield from source.one_of(format.close)):
        source.drop_half_word()
    calls.output.delimiter()


# Styles "object" and "python": a call, or several in a list or one after the other.


def _list(calls: CallReader, delimiter: str, *, python: bool) -> Reader[None]:
    source = calls.source
    yield from source.skip_space()
    in_list = yield from source.one_of("[")
    separators = (",",) if in_list or python else (",", ";")
    while True:
        yield from source.skip_space()
        yield from (_python_call if python else _object)(calls, delimiter)
        yield from source.skip_space()
        separator = yield from source.one_of(*separators)
        if python:  # olmo3 writes a call a line
            if not (yield from source.skip_space()).isidentifier():
                break
        elif not separator:
            break
    if in_list:
        yield from source.one_of("]")


def _object(calls: CallReader, delimiter: str) -> Reader[None]:
    source = calls.source
    name = ""
    held: list[str] | None = None  # arguments that came before the name
    yield from source.expect("{")
    while (yield from source.skip_space()) != "}":
        key = yield from _string(calls)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == "name" and not name:
            name = yield from _string(calls)
            calls.check(delimiter, name)
            if held is not None:
                calls.begin(name, arguments="".join(held))
        elif key in ARGUMENT_KEYS and not calls.inside and held is None:
            if not delimiter and (yield from source.peek()) != "{":
                raise UnexpectedText
            if name:
                calls.begin(name)
                yield from calls.arguments(calls.output.arguments)
            else:
                held = []
                yield from calls.arguments(held.append)
        elif delimiter or key in OTHER_KEYS:
            yield from copy_value(source, ignore)
        else:
            raise UnexpectedText
        yield from source.skip_space()
        if not (yield from source.one_of(",")):
            break
    if not calls.inside:
        calls.check(delimiter, name)
        calls.begin(name, arguments="{}")
    while (yield from source.skip_space()) == "}":  # models miscount the closing ones
        source.take_one()
    calls.end()


def _string(calls: CallReader) -> Reader[str]:
    if (yield from calls.source.peek()) not in ('"', "'"):
        raise UnexpectedText
    chunks: list[str] = []
    yield from copy_string(calls.source, chunks.append)
    return decoded("".join(chunks))


# Styles "header" and "parameters": each call of a section may have a delimiter of its own.


def _each(calls: CallReader, delimiter: str, read_call: ReadCall) -> Reader[None]:
    call_open = calls.format.call_open
    if call_open and delimiter != call_open:
        yield from calls.source.skip_space()
        yield from calls.source.expect(call_open)
    yield from read_call(calls)
    while call_open:
        yield from calls.source.skip_space()
        if not (yield from calls.source.one_of(call_open)):
            break
        yield from read_call(calls)


def _header_call(calls: CallReader) -> Reader[None]:
    source, format = calls.source, calls.format
    assert format.head is not None
    text, word = yield from _head(calls)
    if word != "{":  # the call has no arguments
        for close in reversed(format.call_close):
            text = text.rstrip().removesuffix(close)
    head = format.head.fullmatch(text)
    if head is None or not (word or calls.ends_with(head["name"])):
        raise UnexpectedText
    id = head.groupdict().get("id")
    fits = id is not None and (":" in id if format.ids == "kimi" else len(id) == 9)
    calls.begin(head["name"], id if fits else None, arguments="" if word == "{" else "{}")
    if word == "{":
        yield from calls.arguments(calls.output.arguments)
    calls.end()
    for close in format.call_close:
        yield from source.skip_space()
        yield from source.one_of(close)
    calls.output.delimiter()


def _head(calls: CallReader) -> Reader[tuple[str, str]]:
    """The text up to a call's arguments or its end, and which of them follows, not taken."""
    format = calls.format
    chunks: list[str] = []

    def keep(text: str) -> None:
        chunks.append(text)
        if sum(map(len, chunks)) > MAX_HEAD:
            raise UnexpectedText

    # A delimiter that consists of signs may be part of the head.
    closes = [close for close in format.call_close if close.strip("`")]
    ends = [end for end in (*closes, format.close, format.call_open, *format.opens) if end]
    word = yield from calls.source.copy_until(delimiters("{", *ends), keep, take=False)
    return "".join(chunks), word


def _parameter_call(calls: CallReader) -> Reader[None]:
    source, format, output = calls.source, calls.format, calls.output
    yield from source.skip_space()
    name = yield from source.read(NO_NAME, MAX_NAME)
    if not name:
        raise UnexpectedText
    yield from source.expect(format.name_close)
    ends = (*format.call_close, format.close)
    yield from source.skip_space()
    word = yield from source.one_of(format.argument_open, *ends)
    if not word:
        raise UnexpectedText
    calls.begin(name)
    before = "{"
    while word == format.argument_open:
        key = (yield from source.read(KEY_END, MAX_NAME)).strip()
        yield from source.expect(format.key_close)
        output.arguments(f"{before}{quoted(key)}: ")
        yield from _argument(calls, argument_kinds(calls.tools.get(name, {}), key))
        before = ", "
        yield from source.skip_space()
        word = yield from source.one_of(format.argument_open, *ends)
    if not word:
        raise UnexpectedText
    output.arguments("{}" if before == "{" else "}")
    calls.end()


def _argument(calls: CallReader, kinds: frozenset[str]) -> Reader[None]:
    """Read one argument's text and its end delimiter, behind the key."""
    source, format, output = calls.source, calls.format, calls.output
    if format.value_open:
        yield from source.skip_space()
        word = yield from source.one_of(*(delimiter for delimiter, _ in format.value_open))
        if not word:
            raise UnexpectedText
        if dict(format.value_open)[word]:
            kinds = STRING
    ends = (format.value_close,)
    if format.trim_value:
        yield from source.one_of("\n")
        ends = (f"\n{format.value_close}", format.value_close)
    if kinds == STRING:

        def escape(text: str) -> None:
            output.arguments(escaped(text))

        output.arguments('"')
        if not (yield from source.copy_until(delimiters(*ends), escape)):
            raise UnexpectedText
        output.arguments('"')
        return
    chunks: list[str] = []
    if not (yield from source.copy_until(delimiters(*ends), chunks.append)):
        output.arguments("".join(chunks))
        raise UnexpectedText
    output.arguments(as_argument("".join(chunks), kinds))


def _python_call(calls: CallReader, delimiter: str) -> Reader[None]:
    source, output = calls.source, calls.output
    name = yield from source.read(NO_NAME, MAX_NAME)
    calls.check(delimiter, name)
    yield from source.expect("(")
    while (yield from source.skip_space()) != ")":
        key = yield from source.read(NO_IDENTIFIER, MAX_NAME)
        yield from source.skip_space()
        if not key:
            raise UnexpectedText
        yield from source.expect("=")
        yield from source.skip_space()
        before = ", " if calls.inside else "{"
        if not calls.inside:
            calls.begin(name)
        output.arguments(f"{before}{quoted(key)}: ")
        yield from calls.value(output.arguments, output.arguments)
        yield from source.skip_space()
        if not (yield from source.one_of(",")):
            break
    yield from source.expect(")")
    if calls.inside:
        output.arguments("}")
    else:
        calls.begin(name, arguments="{}")
    calls.end()


READ_CALL: dict[str, ReadCall] = {"header": _header_call, "parameters": _parameter_call}
