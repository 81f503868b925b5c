"""Parsed chunks of an answer -> output items and their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import orjson

from server.apis.responses.items import JsonItem, new_id
from server.generation.answer_text import ScoredToken
from server.generation.choice import Chunk
from server.http.sse import KEEP_ALIVE, DeltaFrame, StreamFormat, frame
from server.http.validation import fields_of
from server.tool_calls.parser.deltas import Delta, ReasoningDelta, ToolCallDelta


# Frames of the Responses API are numbered from 0:
# event: response.output_text.delta\n
# data: {"type":"response.output_text.delta", ..., "sequence_number":7}\n\n
class Events:
    """Numbers the events of one response."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        """The number of an event."""
        self.count += 1
        return self.count - 1

    def frame(self, kind: str, fields: Mapping[str, object]) -> bytes:
        return frame({"type": kind, **fields, "sequence_number": self.next()}, kind)

    def deltas(self, kind: str, place: Mapping[str, object], *more: str) -> DeltaFrame:
        """Of one item: they differ in text, the fields `more` and their number."""
        changing = dict.fromkeys(("delta", *more, "sequence_number"), DeltaFrame.MARK)
        return DeltaFrame({"type": kind, **place, **changing}, kind)

    def item(self, change: Literal["added", "done"], index: int, item: JsonItem) -> bytes:
        fields = {"output_index": index, "item": item}
        return self.frame(f"response.output_item.{change}", fields)

    def stream_format(self) -> StreamFormat:
        """The format of a stream of these events, which ends with its last event."""
        return StreamFormat("text/event-stream; charset=utf-8", b"", KEEP_ALIVE, self._failed)

    def _failed(self, body: bytes) -> bytes:
        error = fields_of(fields_of(orjson.loads(body)).get("error"))
        return self.frame("error", {name: error.get(name) for name in ("code", "message", "param")})


Status = Literal["completed", "incomplete"]
Scores = list[orjson.Fragment]  # log-probabilities of tokens, as JSON


class _TextItem:
    """An open message or reasoning item, which has one part of text."""

    def __init__(self, events: Events, index: int, kind: str) -> None:
        message = kind == "message"
        self.key = kind
        self._events = events
        self._texts: list[str] = []
        self._logprobs: Scores = []
        self._item: JsonItem = {"id": new_id(kind), "type": kind}
        self._item |= {"role": "assistant"} if message else {"summary": []}
        self._place = {"item_id": self._item["id"], "output_index": index, "content_index": 0}
        self._text_type = "output_text" if message else "reasoning_text"
        more = ("logprobs",) if message else ()
        self._delta = events.deltas(f"response.{self._text_type}.delta", self._place, *more)

    def item(self, status: str) -> JsonItem:
        return {**self._item, "status": status, "content": [self._part()]}

    def _part(self) -> JsonItem:
        part: JsonItem = {"type": self._text_type, "text": "".join(self._texts)}
        if self.key == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def opened(self) -> bytes:
        item: JsonItem = {**self._item, "status": "in_progress", "content": []}
        return self._events.item("added", self._place["output_index"], item) + self._events.frame(
            "response.content_part.added", {**self._place, "part": self._part()}
        )

    def add(self, text: str, logprobs: Scores) -> bytes:
        self._texts.append(text)
        if self.key != "message":
            return self._delta.of(text, self._events.next())
        self._logprobs += logprobs
        return self._delta.of(text, logprobs, self._events.next())

    def closed(self) -> bytes:
        part = self._part()
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        return self._events.frame(
            f"response.{self._text_type}.done", self._place | done
        ) + self._events.frame("response.content_part.done", {**self._place, "part": part})


class _CallItem:
    """An open call of a function or of a custom tool."""

    def __init__(self, events: Events, index: int, delta: ToolCallDelta) -> None:
        self.key = delta.index
        self._events = events
        kind = "custom_tool_call" if delta.custom else "function_call"
        self._field = "input" if delta.custom else "arguments"
        self._event = f"response.{kind}_{self._field}"
        self._texts: list[str] = []
        self._item: JsonItem = {"id": new_id(kind), "type": kind}
        self._item |= {"call_id": delta.id, "name": delta.name}
        self._place = {"item_id": self._item["id"], "output_index": index}
        self._delta = events.deltas(f"{self._event}.delta", self._place)

    def item(self, status: str) -> JsonItem:
        return {**self._item, self._field: "".join(self._texts), "status": status}

    def opened(self) -> bytes:
        return self._events.item("added", self._place["output_index"], self.item("in_progress"))

    def add(self, text: str, logprobs: Scores) -> bytes:
        """Calls have no log-probabilities."""
        self._texts.append(text)
        return self._delta.of(text, self._events.next()) if text else b""

    def closed(self) -> bytes:
        done = {self._field: "".join(self._texts)}
        if self._field == "arguments":
            done["name"] = self._item["name"]
        return self._events.frame(f"{self._event}.done", self._place | done)


class OutputItems:
    """The items of one answer, one open at a time, in the order in which the model wrote them."""

    def __init__(self, events: Events, score: Callable[[Sequence[ScoredToken]], Scores]) -> None:
        """`score` returns the log-probabilities that the request asks for."""
        self._events = events
        self._score = score
        self._closed: list[JsonItem] = []
        self._open: _TextItem | _CallItem | None = None
        self._waiting: Scores = []  # of tokens whose text has not come yet

    def items(self) -> list[JsonItem]:
        """All items; the open one has the status in_progress."""
        return self._closed + ([] if self._open is None else [self._open.item("in_progress")])

    def feed(self, chunk: Chunk) -> bytes:
        """The frames of a chunk."""
        # Reasoning, calls and delimiters have no log-probabilities.
        scored = [each for each in chunk.scored if each.part == "content"]
        if scored:
            self._waiting += self._score(scored)
        return b"".join([self._add(delta) for delta in chunk.deltas])

    def _add(self, delta: Delta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            key, text = delta.index, delta.arguments
        else:
            key = "reasoning" if isinstance(delta, ReasoningDelta) else "message"
            text = delta.text
        data = b""
        item = self._open
        if item is None or item.key != key:
            data = self.close("completed")
            index = len(self._closed)
            if isinstance(delta, ToolCallDelta):
                item = _CallItem(self._events, index, delta)
            else:
                item = _TextItem(self._events, index, str(key))
            self._open = item
            data += item.opened()
        logprobs: Scores = []
        if item.key == "message":
            logprobs, self._waiting = self._waiting, logprobs
        return data + item.add(text, logprobs)

    def end(self, status: Status) -> bytes:
        """Close the last item.  An answer without any is an empty message."""
        data = b""
        if not self._closed and self._open is None:
            self._open = _TextItem(self._events, 0, "message")
            data = self._open.opened()
        if self._waiting and isinstance(self._open, _TextItem) and self._open.key == "message":
            data += self._open.add("", self._waiting)  # of tokens without text, such as the last
        return data + self.close(status)

    def close(self, status: Status) -> bytes:
        """Close the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        data = item.closed()
        done = item.item(status)
        data += self._events.item("done", len(self._closed), done)
        self._closed.append(done)
        return data
