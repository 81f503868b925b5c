"""Parts of an answer -> output items and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import orjson

from server.apis.responses.items import JsonItem, new_id
from server.generation.chat_request import ParsedChunk
from server.generation.choice import ScoredToken
from server.http.sse import KEEP_ALIVE, StreamFormat, around, frame
from server.http.validation import fields_of
from server.tool_calls.parser.deltas import Delta, ReasoningDelta, ToolCallDelta


# Frames of the Responses API are numbered from 0:
# event: response.output_text.delta\n
# data: {"type":"response.output_text.delta", ..., "sequence_number":7}\n\n
class Events:
    """Numbers the events of one response."""

    def __init__(self) -> None:
        self.count = 0

    def frame(self, kind: str, fields: Mapping[str, object]) -> bytes:
        number = self.count
        self.count += 1
        return frame({"type": kind, **fields, "sequence_number": number}, kind)

    def delta(self, kind: str, place: Mapping[str, object]) -> DeltaEvent:
        return DeltaEvent(self, kind, place)

    def stream_format(self) -> StreamFormat:
        """The format of a stream of these events, which ends with its last event."""
        return StreamFormat("text/event-stream; charset=utf-8", b"", KEEP_ALIVE, self._failed)

    def _failed(self, body: bytes) -> bytes:
        error = fields_of(fields_of(orjson.loads(body)).get("error"))
        return self.frame("error", {name: error.get(name) for name in ("code", "message", "param")})


class DeltaEvent:
    """The frames of one item's deltas, which differ in text and number only."""

    __slots__ = ("_after", "_before", "_events")

    def __init__(self, events: Events, kind: str, place: Mapping[str, object]) -> None:
        self._events = events
        before, self._after = around(kind)
        self._before = before + orjson.dumps({"type": kind, **place})[:-1] + b',"delta":'

    def of(self, text: str, more: bytes = b"") -> bytes:
        """`more` is JSON of further fields, each after a comma."""
        number = self._events.count
        self._events.count += 1
        delta = orjson.dumps(text)
        return b'%b%b%b,"sequence_number":%d}%b' % (self._before, delta, more, number, self._after)


Status = Literal["completed", "incomplete"]
Scores = list[orjson.Fragment]  # log-probabilities of tokens, as JSON
Score = Callable[[list[ScoredToken]], Scores]


class _TextItem:
    """A message or a reasoning item in the making: one part of text."""

    def __init__(self, events: Events, index: int, kind: str) -> None:
        message = kind == "message"
        self.kind = kind
        self._events = events
        self._texts: list[str] = []
        self.logprobs: Scores = []
        self._item: JsonItem = {"id": new_id("msg" if message else "rs"), "type": kind}
        self._item |= {"role": "assistant"} if message else {"summary": []}
        self._where = {"item_id": self._item["id"], "output_index": index, "content_index": 0}
        self._text_kind = "output_text" if message else "reasoning_text"
        self._delta = events.delta(f"response.{self._text_kind}.delta", self._where)

    def item(self, status: str) -> JsonItem:
        return {**self._item, "status": status, "content": [self._part()]}

    def _part(self) -> JsonItem:
        part: JsonItem = {"type": self._text_kind, "text": "".join(self._texts)}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": self.logprobs}
        return part

    def opened(self) -> bytes:
        item: JsonItem = {**self._item, "status": "in_progress", "content": []}
        place: JsonItem = {"output_index": self._where["output_index"], "item": item}
        return self._events.frame("response.output_item.added", place) + self._events.frame(
            "response.content_part.added", {**self._where, "part": self._part()}
        )

    def add(self, text: str, logprobs: Scores) -> bytes:
        self._texts.append(text)
        if self.kind != "message":
            return self._delta.of(text)
        self.logprobs += logprobs
        return self._delta.of(text, b',"logprobs":%b' % orjson.dumps(logprobs))

    def closed(self, status: Status) -> bytes:
        part = self._part()
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        write = self._events.frame
        return (
            write(f"response.{self._text_kind}.done", self._where | done)
            + write("response.content_part.done", {**self._where, "part": part})
            + write(
                "response.output_item.done",
                {"output_index": self._where["output_index"], "item": self.item(status)},
            )
        )


class _CallItem:
    """A call of a function or of a custom tool in the making."""

    def __init__(self, events: Events, index: int, delta: ToolCallDelta) -> None:
        self.call = delta.index
        self._events = events
        kind, prefix, self._field = "function_call", "fc", "arguments"
        self._told = "response.function_call_arguments"
        if delta.custom:
            kind, prefix, self._field = "custom_tool_call", "ctc", "input"
            self._told = "response.custom_tool_call_input"
        self._text: list[str] = []
        self._item: JsonItem = {
            "id": new_id(prefix),
            "type": kind,
            "call_id": delta.id,
            "name": delta.name,
        }
        self._where = {"item_id": self._item["id"], "output_index": index}
        self._delta = events.delta(f"{self._told}.delta", self._where)

    def item(self, status: str) -> JsonItem:
        return {**self._item, self._field: "".join(self._text), "status": status}

    def opened(self) -> bytes:
        place = {"output_index": self._where["output_index"], "item": self.item("in_progress")}
        return self._events.frame("response.output_item.added", place)

    def add(self, text: str) -> bytes:
        self._text.append(text)
        return self._delta.of(text) if text else b""

    def closed(self, status: Status) -> bytes:
        item = self.item(status)
        done = {self._field: item[self._field]}
        if item["type"] == "function_call":
            done["name"] = item["name"]
        return self._events.frame(f"{self._told}.done", self._where | done) + self._events.frame(
            "response.output_item.done",
            {"output_index": self._where["output_index"], "item": item},
        )


class OutputItems:
    """The items of one answer, one open at a time, in the order in which the model wrote them."""

    def __init__(self, events: Events, score: Score) -> None:
        """`score` gives the log-probabilities that the caller wants of the tokens of a part."""
        self._events = events
        self._score = score
        self._closed: list[JsonItem] = []
        self._open: _TextItem | _CallItem | None = None
        self._waiting: Scores = []  # of tokens whose text has not come yet

    def items(self) -> list[JsonItem]:
        """All items; the open one has the status in_progress."""
        return self._closed + ([] if self._open is None else [self._open.item("in_progress")])

    def feed(self, part: ParsedChunk) -> bytes:
        """The frames that tell of a part."""
        if part.scored:
            self._waiting += self._score(part.scored)
        data = b""
        for delta in part.deltas:
            # Those of content travel with it; reasoning and calls have none.
            scores, self._waiting = self._waiting, []
            if isinstance(delta, ToolCallDelta):
                data += self._call(delta)
            else:
                data += self._text(delta, scores)
        return data

    def _text(self, delta: Delta, logprobs: Scores) -> bytes:
        assert not isinstance(delta, ToolCallDelta)
        kind = "reasoning" if isinstance(delta, ReasoningDelta) else "message"
        data = b""
        item = self._open
        if not isinstance(item, _TextItem) or item.kind != kind:
            data = self.close("completed")
            item = self._open = _TextItem(self._events, len(self._closed), kind)
            data += item.opened()
        return data + item.add(delta.text, logprobs)

    def _call(self, delta: ToolCallDelta) -> bytes:
        data = b""
        item = self._open
        if not isinstance(item, _CallItem) or item.call != delta.index:
            data = self.close("completed")
            item = self._open = _CallItem(self._events, len(self._closed), delta)
            data += item.opened()
        return data + item.add(delta.arguments)

    def end(self, status: Status) -> bytes:
        """Close the last item.  An answer without any is an empty message."""
        data = b""
        if not self._closed and self._open is None:
            self._open = _TextItem(self._events, 0, "message")
            data = self._open.opened()
        return data + self.close(status)

    def close(self, status: Status) -> bytes:
        """Close the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        data = b""
        if isinstance(item, _TextItem) and item.kind == "message" and self._waiting:
            data = item.add("", self._waiting)  # of tokens without text, such as the last
            self._waiting = []
        self._closed.append(item.item(status))
        return data + item.closed(status)
