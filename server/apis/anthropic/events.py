"""An answer as Anthropic's message, whole or as events.

    message_start
      content_block_start, ping, content_block_delta ..., content_block_stop   for each block
    message_delta   with stop_reason and usage
    message_stop

Blocks follow each other: one ends before the next begins.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import orjson

from server.apis.anthropic.request import anthropic_id
from server.apis.error_format import anthropic_failure
from server.apis.openai.chat_schema import ChatRequest
from server.generation.choice import ChatFinish, Chunk
from server.generation.choice_stats import ChoiceStats
from server.generation.generated_answer import GeneratedAnswer
from server.generation.generation import Generation
from server.http.sse import DeltaFrame, StreamFormat, frame
from server.tool_calls.custom import input_json
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

PING = frame({"type": "ping"}, "ping")
STREAM = StreamFormat("text/event-stream; charset=utf-8", b"", PING, anthropic_failure)


def usage_of(stats: ChoiceStats) -> dict[str, object]:
    """Anthropic's `input_tokens` are those that the prefix cache did not hold."""
    return {
        "input_tokens": stats.prompt_tokens - stats.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached,
        "output_tokens": stats.generated,
        "service_tier": "standard",
    }


def signature_of(thinking: list[str]) -> str:
    """A digest of a thinking block's text.  Clients send it back; nothing here depends on it."""
    digest = hashlib.sha256("".join(thinking).encode()).digest()
    return base64.b64encode(digest).decode()


def tool_use(id: str, name: str | None, input: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": anthropic_id(id), "name": name, "input": input}


def event(data: dict[str, Any]) -> bytes:
    return frame(data, data["type"])


class MessageAnswer:
    """Writes one answer, whole or as events."""

    def __init__(self, chat: ChatRequest, generation: Generation, *, show_thinking: bool) -> None:
        self._chat = chat
        self._name = generation.name
        [self._choice] = generation.choices
        self._show_thinking = show_thinking
        self._started = False
        self._index = -1  # of the open block, or of the last one
        self._open: str | None = None  # its type
        self._text: DeltaFrame | None = None  # writes the deltas of the open text block
        self._thinking: list[str] = []  # of the open thinking block, or of the last one
        self._called = False

    def whole(self, answer: GeneratedAnswer) -> bytes:
        """The JSON of a message."""
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            thinking = answer.reasoning if self._show_thinking else ""
            signature = signature_of(answer.reasoning_chunks)
            content.append({"type": "thinking", "thinking": thinking, "signature": signature})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls:
            content.append(tool_use(call.id, call.name, input_json(call.arguments)))
        stop = self._stop(answer.finish, called=bool(answer.tool_calls))
        return orjson.dumps(self._message(content, stop))

    def _message(self, content: list[dict[str, Any]], stop: dict[str, object]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._chat.model,
            "content": content,
            **stop,
            "usage": usage_of(self._choice.stats),
        }

    def _stop(self, finish: ChatFinish | None, *, called: bool) -> dict[str, object]:
        """`stop_reason` and `stop_sequence` of an answer; `called`: whether it calls tools."""
        reason, hit = "end_turn", self._choice.stop_hit
        if finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        if finish == "length":
            cut = self._choice.stats.generated < (self._chat.max_tokens or 0)
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        elif called and finish == "tool_calls":
            reason = "tool_use"
        elif isinstance(hit, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": hit}
        return {"stop_reason": reason, "stop_sequence": None}

    def render(self, chunk: Chunk) -> bytes:
        """The events of a chunk."""
        data = b"" if self._started else self._start()
        for delta in chunk.deltas:
            data += self._delta(delta)
        if chunk.finish is not None:
            data += self._close_block()
            stop = self._stop(chunk.finish, called=self._called)
            usage = usage_of(self._choice.stats)
            del usage["service_tier"]  # in message_start only
            data += event({"type": "message_delta", "delta": stop, "usage": usage})
            data += event({"type": "message_stop"})
        return data

    def _start(self) -> bytes:
        self._started = True
        message = self._message([], self._stop(None, called=False))
        return event({"type": "message_start", "message": message})

    def _delta(self, delta: Delta) -> bytes:
        if isinstance(delta, ContentDelta):
            data = b"" if self._open == "text" else self._open_text()
            assert self._text is not None
            return data + self._text.of(delta.text)
        if isinstance(delta, ReasoningDelta):
            data = b""
            if self._open != "thinking":
                self._thinking = []
                data = self._open_block({"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(delta.text)
            if not self._show_thinking:
                return data
            return data + self._block_delta(type="thinking_delta", thinking=delta.text)
        data = b""
        if delta.id is not None:
            self._called = True
            data = self._open_block(tool_use(delta.id, delta.name, {}))
        if delta.arguments:
            data += self._block_delta(type="input_json_delta", partial_json=delta.arguments)
        return data

    def _open_text(self) -> bytes:
        data = self._open_block({"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": DeltaFrame.MARK}
        kind = "content_block_delta"
        self._text = DeltaFrame({"type": kind, "index": self._index, "delta": delta}, kind)
        return data

    def _open_block(self, block: dict[str, Any]) -> bytes:
        data = self._close_block()
        first = self._index < 0
        self._index += 1
        self._open = block["type"]
        data += event({"type": "content_block_start", "index": self._index, "content_block": block})
        return data + PING if first else data

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open == "thinking":
            data = self._block_delta(type="signature_delta", signature=signature_of(self._thinking))
        self._open = None
        return data + event({"type": "content_block_stop", "index": self._index})

    def _block_delta(self, **delta: str) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})
