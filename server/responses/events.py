"""Events of the Responses API: their frames, numbered from 0.

event: response.output_text.delta\\n
data: {"type":"response.output_text.delta", ..., "sequence_number":7}\\n\\n
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from server.schema.base import fields_of
from server.sse import KEEP_ALIVE, Wire


class Events:
    """Numbers the events of one response."""

    def __init__(self) -> None:
        self.count = 0

    def frame(self, kind: str, fields: Mapping[str, object]) -> bytes:
        data = orjson.dumps({"type": kind, **fields, "sequence_number": self.count})
        self.count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def delta(self, kind: str, place: Mapping[str, object]) -> DeltaEvent:
        return DeltaEvent(self, kind, place)

    def wire(self) -> Wire:
        """The form of a stream of these events: nothing comes after the last one."""
        return Wire("text/event-stream; charset=utf-8", b"", KEEP_ALIVE, self._failed)

    def _failed(self, body: bytes) -> bytes:
        error = fields_of(fields_of(orjson.loads(body)).get("error"))
        return self.frame("error", {name: error.get(name) for name in ("code", "message", "param")})


class DeltaEvent:
    """The frames of one item's deltas, which differ in text and number only."""

    __slots__ = ("_events", "_head")

    def __init__(self, events: Events, kind: str, place: Mapping[str, object]) -> None:
        self._events = events
        data = orjson.dumps({"type": kind, **place})
        self._head = b"event: %b\ndata: %b" % (kind.encode(), data[:-1])

    def of(self, text: str, more: bytes = b"") -> bytes:
        """`more` is JSON of further fields, each after a comma."""
        number = self._events.count
        self._events.count += 1
        delta = orjson.dumps(text)
        return b'%b,"delta":%b%b,"sequence_number":%d}\n\n' % (self._head, delta, more, number)
