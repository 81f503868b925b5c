"""Readers of one section of calls, one for each style (server/parsing/formats.py).

Each is called behind the mark that opened the section, takes the mark that closes it if it is
there, and raises Broken where the text is no call.  Nothing of a call becomes a delta before its
name is certain; from then on its arguments go out as they come.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from server.parsing.formats import ToolFormat
from server.parsing.literal import as_json, copy_string, copy_value, escaped, quoted
from server.parsing.output import Output
from server.parsing.source import Broken, Reader, Sink, Source, ignore, marks
from server.parsing.values import STRING, Schema, argument_kinds, as_argument, decoded

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # beside these, a call without a mark has no keys
BRACE = re.compile(r"\{")
NO_NAME = re.compile(r"[^\w.-]")
NO_IDENTIFIER = re.compile(r"\W")
KEY_END = re.compile(r'[<>"\n]')
MOST_HEAD = 512  # characters from the mark to the arguments
MOST_NAME = 256


class CallReader:
    """Reads sections of calls from a source, and tells the output."""

    def __init__(
        self,
        format: ToolFormat,
        source: Source,
        output: Output,
        tools: Mapping[str, Schema],
    ) -> None:
        """`tools` are the parameter schemas of the functions that may be called."""
        self.format = format
        self.inside = False  # a call was begun and has not ended
        self._source = source
        self._output = output
        self._tools = tools
        styles = {
            "object": self._objects,
            "header": self._headers,
            "parameters": self._parameters,
            "python": self._python_calls,
        }
        self._style = styles.get(format.style)

    def may_start(self, char: str) -> bool:
        """Whether an answer that begins with this character may be a call without a mark."""
        first = "{" if self.format.style == "object" else "["
        return self.format.bare and char == first

    def section(self, mark: str) -> Reader[None]:
        """Read a section that `mark` opened, "" for none.  Raises Broken."""
        assert self._style is not None
        if self.format.objects and (yield from self._source.skip_space()) in ("[", "{"):
            yield from self._objects(mark)
        else:
            yield from self._style(mark)
        yield from self._source.skip_space()
        yield from self._source.one_of(self.format.close)
        self._output.mark()

    def begin(self, name: str, id: str | None = None) -> None:
        self.inside = True
        self._output.begin_call(name, id)

    def _end(self) -> None:
        self.inside = False
        self._output.mark()

    def arguments(self, sink: Sink) -> Reader[None]:
        """Read an object of arguments, {} for null.  One inside a string is unpacked."""
        source = self._source
        char = yield from source.peek()
        if char in ('"', "'", "n", "N"):
            pieces: list[str] = []
            yield from self._unless_cut_off(pieces.append, sink)
            text = "".join(pieces)
            inner = as_json(decoded(text)) if text[0] == '"' else "{}"
            sink(inner if inner is not None and inner[0] == "{" else text)
        else:
            yield from self._unless_cut_off(sink, sink)

    def _unless_cut_off(self, sink: Sink, rest: Sink) -> Reader[None]:
        try:
            yield from copy_value(self._source, sink)
        except Broken:
            if self._source.exhausted():  # the answer ends here: so do its arguments
                rest("".join(self._source.taken))
            raise

    def _known(self, mark: str, name: str) -> None:
        """Without a mark only a name that was offered makes a text a call."""
        if not name or (not mark and name not in self._tools):
            raise Broken

    # Style "object".

    def _objects(self, mark: str) -> Reader[None]:
        source = self._source
        yield from source.skip_space()
        in_list = yield from source.one_of("[")
        while True:
            yield from source.skip_space()
            yield from self._object(mark)
            yield from source.skip_space()
            if not (yield from source.one_of(*(",", ";")[: 1 if in_list else 2])):
                break
        if in_list:
            yield from source.one_of("]")

    def _object(self, mark: str) -> Reader[None]:
        source = self._source
        name = ""
        held: list[str] | None = None  # arguments that came before the name
        begun = False
        yield from source.expect("{")
        while (yield from source.skip_space()) != "}":
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from self._string()
                self._known(mark, name)
                if held is not None:
                    begun = self._begin_with(name, held)
            elif key in ARGUMENT_KEYS and not begun and held is None:
                if not mark and (yield from source.peek()) != "{":
                    raise Broken
                if name:
                    begun = self._begin_with(name, [])
                    yield from self.arguments(self._output.arguments)
                    self.inside = False
                else:
                    held = []
                    yield from self.arguments(held.append)
            elif mark or key in OTHER_KEYS:
                yield from copy_value(source, ignore)
            else:
                raise Broken
            yield from source.skip_space()
            if not (yield from source.one_of(",")):
                break
        if not begun:
            self._known(mark, name)
            self._begin_with(name, ["{}"])
        while (yield from source.skip_space()) == "}":  # models miscount the closing ones
            source.take_one()
        self._end()

    def _begin_with(self, name: str, arguments: list[str]) -> bool:
        self.begin(name)
        self._output.arguments("".join(arguments))
        return True

    def _key(self) -> Reader[str]:
        key = yield from self._string()
        yield from self._source.skip_space()
        yield from self._source.expect(":")
        yield from self._source.skip_space()
        return key

    def _string(self) -> Reader[str]:
        if (yield from self._source.peek()) not in ('"', "'"):
            raise Broken
        pieces: list[str] = []
        yield from copy_string(self._source, pieces.append)
        return decoded("".join(pieces))

    # Styles "header" and "parameters": each call of a section may have a mark of its own.

    def _each(self, mark: str, read_call: Callable[[], Reader[None]]) -> Reader[None]:
        call_open = self.format.call_open
        if call_open and mark != call_open:
            yield from self._source.skip_space()
            yield from self._source.expect(call_open)
        yield from read_call()
        while call_open:
            yield from self._source.skip_space()
            if not (yield from self._source.one_of(call_open)):
                break
            yield from read_call()

    def _headers(self, mark: str) -> Reader[None]:
        yield from self._each(mark, self._header_call)

    def _header_call(self) -> Reader[None]:
        source, format = self._source, self.format
        assert format.head is not None
        head = format.head.fullmatch((yield from source.read(BRACE, MOST_HEAD)))
        if head is None or (yield from source.peek()) != "{":
            raise Broken
        id = head.groupdict().get("id")
        fits = id is not None and (":" in id if format.ids == "kimi" else len(id) == 9)
        self.begin(head["name"], id if fits else None)
        yield from self.arguments(self._output.arguments)
        self._end()
        for close in format.call_close:
            yield from source.skip_space()
            yield from source.one_of(close)
        self._output.mark()

    def _parameters(self, mark: str) -> Reader[None]:
        yield from self._each(mark, self._parameter_call)

    def _parameter_call(self) -> Reader[None]:
        source, format, output = self._source, self.format, self._output
        yield from source.skip_space()
        name = yield from source.read(NO_NAME, MOST_NAME)
        self._known(format.name, name)
        yield from source.expect(format.name_close)
        ends = (*format.call_close, format.close)
        yield from source.skip_space()
        word = yield from source.one_of(format.argument_open, *ends)
        if not word:
            raise Broken
        self.begin(name)
        before = "{"
        while word == format.argument_open:
            key = (yield from source.read(KEY_END, MOST_NAME)).strip()
            yield from source.expect(format.key_close)
            output.arguments(f"{before}{quoted(key)}: ")
            yield from self._argument(argument_kinds(self._tools.get(name, {}), key))
            before = ", "
            yield from source.skip_space()
            word = yield from source.one_of(format.argument_open, *ends)
        if not word:
            raise Broken
        output.arguments("{}" if before == "{" else "}")
        self._end()

    def _argument(self, kinds: frozenset[str]) -> Reader[None]:
        """Read one argument's text and its end mark, behind the key."""
        source, format, output = self._source, self.format, self._output
        if format.value_open:
            yield from source.skip_space()
            word = yield from source.one_of(*(mark for mark, _ in format.value_open))
            if not word:
                raise Broken
            if dict(format.value_open)[word]:
                kinds = STRING
        ends = (format.value_close,)
        if format.trim_value:
            yield from source.one_of("\n")
            ends = (f"\n{format.value_close}", format.value_close)
        if kinds == STRING:
            output.arguments('"')
            if not (yield from source.copy_until(marks(*ends), self._escaped)):
                raise Broken
            output.arguments('"')
            return
        pieces: list[str] = []
        if not (yield from source.copy_until(marks(*ends), pieces.append)):
            output.arguments("".join(pieces))
            raise Broken
        output.arguments(as_argument("".join(pieces), kinds))

    def _escaped(self, text: str) -> None:
        self._output.arguments(escaped(text))

    # Style "python".

    def _python_calls(self, mark: str) -> Reader[None]:
        source = self._source
        yield from source.skip_space()
        in_list = yield from source.one_of("[")
        while True:
            yield from source.skip_space()
            yield from self._python_call(mark)
            yield from source.skip_space()
            comma = yield from source.one_of(",")
            following = yield from source.skip_space()
            # Without a mark at either end, words after a call without a list are an answer.
            if not (following.isidentifier() and (comma or in_list or self.format.close)):
                break
        if in_list:
            yield from source.one_of("]")

    def _python_call(self, mark: str) -> Reader[None]:
        source, output = self._source, self._output
        name = yield from source.read(NO_NAME, MOST_NAME)
        self._known(mark, name)
        yield from source.expect("(")
        begun = False
        while (yield from source.skip_space()) != ")":
            key = yield from source.read(NO_IDENTIFIER, MOST_NAME)
            yield from source.skip_space()
            if not key:
                raise Broken
            yield from source.expect("=")
            yield from source.skip_space()
            if not begun:
                self.begin(name)
            output.arguments(f"{', ' if begun else '{'}{quoted(key)}: ")
            begun = True
            yield from self._unless_cut_off(output.arguments, output.arguments)
            yield from source.skip_space()
            if not (yield from source.one_of(",")):
                break
        yield from source.expect(")")
        if not begun:
            self.begin(name)
        output.arguments("}" if begun else "{}")
        self._end()
