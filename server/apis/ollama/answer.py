"""What an answer is made of -> Ollama's lines of JSON, or its one object.

    {"model": ..., "created_at": ..., "message": {"role": ..., "content": "..."}, "done": false}
    {"model": ..., "message": ..., "done": true, "done_reason": ..., "total_duration": ...}

/api/generate has `response` (and `thinking`) where /api/chat has `message`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from server.apis.error_format import ollama_failure
from server.generation.chat_request import (
    ChatFinish,
    GeneratedAnswer,
    GeneratedToolCall,
    ParsedChunk,
)
from server.generation.choice import Choice, ScoredToken
from server.generation.logprobs import CHARS_PER_LOGPROB, chat_logprobs
from server.generation.off_loop import off_loop
from server.http.sse import StreamFormat
from server.prompt.tokenizer import ChatTokenizer
from server.tool_calls.custom import input_json
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

STREAM = StreamFormat("application/x-ndjson", b"", b"", ollama_failure)


def head(model: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def timing_fields(choice: Choice, finish: ChatFinish) -> dict[str, Any]:
    """How it ended and what it took; durations in nanoseconds.

    load_duration is the wait for a place among the running requests: the model itself is loaded.
    """
    now = choice.ended or time.monotonic()
    arrived = choice.mailbox.arrived
    started = choice.started or arrived
    first = choice.first_token or started
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
        "total_duration": _nanoseconds(arrived, now),
        "load_duration": _nanoseconds(arrived, started),
        "prompt_eval_count": len(choice.prompt),
        "prompt_eval_duration": _nanoseconds(started, first),
        "eval_count": choice.generated,
        "eval_duration": _nanoseconds(first, now),
    }


def _nanoseconds(begin: float, end: float) -> int:
    return max(0, round((end - begin) * 1e9))


class OllamaAnswer:
    """Writes one answer, whole or in lines."""

    def __init__(
        self, model: str, tokenizer: ChatTokenizer, *, chat: bool, top_logprobs: int | None
    ) -> None:
        """top_logprobs: how many alternatives to tell of each token; None for no logprobs."""
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._top = top_logprobs
        self._call: GeneratedToolCall | None = None  # its arguments may go on

    async def whole(self, answer: GeneratedAnswer) -> bytes:
        said = self._said(answer.content, answer.reasoning, answer.tool_calls)
        end = timing_fields(answer.choice, answer.finish)
        work = CHARS_PER_LOGPROB * len(answer.scored) * (1 + (self._top or 0))
        scores = await off_loop(work, lambda: self._logprobs(answer.scored))
        return orjson.dumps({**head(self._model), **said, **scores, **end})

    def render(self, choice: Choice, part: ParsedChunk) -> bytes:
        """The lines that tell of a part, as ChatTurn.stream wants them."""
        lines = [self._delta(delta) for delta in part.deltas]
        if part.finish is not None:
            lines.append(self._finished_call())
        said = [line for line in lines if line is not None]
        scores = self._logprobs(part.scored)
        if scores and not said:
            said = [self._said("")]
        data = b""
        for line in said:  # log-probabilities travel with the first line of their part
            data += _line({**head(self._model), **line, **scores, "done": False})
            scores = {}
        if part.finish is not None:
            end = timing_fields(choice, part.finish)
            data += _line({**head(self._model), **self._said(""), **end})
        return data

    def loaded(self) -> bytes:
        """The answer to a request without a prompt, which asks Ollama to load the model."""
        end = {"done": True, "done_reason": "load"}
        return _line({**head(self._model), **self._said(""), **end})

    def _delta(self, delta: Delta) -> dict[str, Any] | None:
        """A line for a delta; a call waits until all of it is there."""
        if isinstance(delta, ContentDelta):
            return self._said(delta.text)
        if isinstance(delta, ReasoningDelta):
            return self._said("", delta.text)
        if delta.id is None:
            assert self._call is not None, "arguments without a call"
            self._call.texts.append(delta.arguments)
            return None
        line = self._finished_call()
        self._call = GeneratedToolCall(delta.id, delta.name or "", [delta.arguments])
        return line

    def _finished_call(self) -> dict[str, Any] | None:
        call, self._call = self._call, None
        return None if call is None else self._said("", calls=[call])

    def _said(
        self, content: str, thinking: str = "", calls: Sequence[GeneratedToolCall] = ()
    ) -> dict[str, Any]:
        extra = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": content, **extra}
        message: dict[str, Any] = {"role": "assistant", "content": content, **extra}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": input_json(call.arguments)},
                }
                for call in calls
            ]
        return {"message": message}

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, Any]:
        if self._top is None or not scored:
            return {}
        return {"logprobs": chat_logprobs(self._tokenizer, scored, self._top)}


def _line(data: Mapping[str, Any]) -> bytes:
    return orjson.dumps(data) + b"\n"
