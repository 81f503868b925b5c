"""A streaming parser of multipart/form-data, in time linear in the bytes of the body.

Source: RFC 7578, RFC 2046 section 5.1.
"""

from __future__ import annotations

import re
from email.message import Message
from typing import Protocol

from server.errors import RequestError, UnsupportedMediaType

MAX_PARTS = 16
MAX_HEAD_BYTES = 8192  # of one part
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


class PartSink(Protocol):
    """Receives the parts of a form as they arrive.  May raise RequestError."""

    def begin(self, name: str, filename: str | None) -> None: ...

    def data(self, chunk: bytes) -> None: ...

    def end(self) -> None: ...


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form's parts.  Raises UnsupportedMediaType, RequestError."""
    header = Message()
    header["content-type"] = content_type.replace("\r", " ").replace("\n", " ")
    if header.get_content_type() != "multipart/form-data":
        kind = content_type.partition(";")[0].strip()[:60] or "not given"
        raise UnsupportedMediaType("the content type is `{}`: send `multipart/form-data`", kind)
    boundary = _parameter(header, "content-type", "boundary")
    if boundary is None or not BOUNDARY.fullmatch(boundary):
        raise RequestError(
            "the content type has no valid boundary: use a client's own way to send forms",
            code="invalid_multipart",
        )
    return boundary.encode()


class MultipartReader:
    """Parses a body in chunks; buffers at most the head of a part or a boundary."""

    def __init__(self, boundary: bytes, sink: PartSink) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._sink = sink
        self._rest = b"\r\n"  # so that the first boundary is found as the others are
        self._step = self._preamble
        self._num_parts = 0
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Raises RequestError, and what the sink raises."""
        self._rest += data
        while not self.ended and self._step():
            pass
        if self.ended:
            self._rest = b""  # an epilogue is ignored

    def close(self) -> None:
        """To call at the end of the body.  Raises RequestError if it is incomplete."""
        if not self.ended:
            raise _broken("it ends before its last boundary")

    def _until_delimiter(self) -> tuple[bytes, bool]:
        """What comes before the next delimiter, and whether that one was seen."""
        before, found, rest = self._rest.partition(self._delimiter)
        if not found:  # its beginning may stand at the end
            end = max(0, len(before) - len(self._delimiter) + 1)
            before, rest = before[:end], before[end:]
        self._rest = rest
        return before, bool(found)

    def _preamble(self) -> bool:
        before, found = self._until_delimiter()
        if before.strip(b"\r\n"):
            raise _broken("it does not begin with its boundary")
        if found:
            self._step = self._after_delimiter
        return found

    def _after_delimiter(self) -> bool:
        if len(self._rest) < 2:
            return False
        if self._rest.startswith(b"--"):
            self.ended = True
            return False
        end = self._rest.find(b"\r\n", 0, 256)
        if end < 0 and len(self._rest) < 256:
            return False
        if end < 0 or self._rest[:end].strip(b" \t"):
            raise _broken("a boundary is not followed by the end of its line")
        # The line break stays: a part without headers begins with an empty line.
        self._rest = self._rest[end:]
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._step = self._head
        return True

    def _head(self) -> bool:
        end = self._rest.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._rest) >= MAX_HEAD_BYTES:
                raise _broken(f"the head of a part is longer than {MAX_HEAD_BYTES} bytes")
            return False
        head, self._rest = self._rest[:end], self._rest[end + 4 :]
        self._sink.begin(*_names(head))
        self._step = self._body
        return True

    def _body(self) -> bool:
        chunk, found = self._until_delimiter()
        if chunk:
            self._sink.data(chunk)
        if found:
            self._sink.end()
            self._step = self._after_delimiter
        return found


def _names(head: bytes) -> tuple[str, str | None]:
    """Name and file name of a part, from its headers."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            header = Message()
            header["content-disposition"] = value.strip().replace("\r", " ").replace("\n", " ")
            name = _parameter(header, "content-disposition", "name")
            if name:
                return name, _parameter(header, "content-disposition", "filename")
    raise _broken("a part has no Content-Disposition with a name")


def _parameter(message: Message, header: str, name: str) -> str | None:
    """A parameter of a header.

    One with a charset, filename*=utf-8''a%20b, is always read as UTF-8: with other charsets Python
    raises, or returns half a surrogate pair.
    """
    try:
        value = message.get_param(name, header=header)
    except ValueError:  # filename*99...99=a, with thousands of digits
        raise _broken(f"the parameters of {header} cannot be read") from None
    if isinstance(value, tuple):
        return value[2].encode("latin-1", "replace").decode("utf-8", "replace")
    return value


def _broken(why: str) -> RequestError:
    return RequestError(
        "the body is not valid multipart/form-data: {}", why, code="invalid_multipart"
    )
