"""Parsed chunks -> Ollama's lines of JSON; a whole answer -> its one object.

    {"model": ..., "created_at": ..., "message": {"role": ..., "content": "..."}, "done": false}
    {"model": ..., "message": ..., "done": true, "done_reason": ..., "total_duration": ...}

/api/generate has `response` (and `thinking`) where /api/chat has `message`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from server.apis.error_format import ollama_failure
from server.apis.ollama.schema import OllamaBody, OllamaChatBody
from server.generation.answer_text import ScoredToken
from server.generation.choice import ChatFinish, Choice, Chunk
from server.generation.generated_answer import GeneratedAnswer, GeneratedToolCall
from server.generation.logprobs import CHARS_PER_LOGPROB, chat_logprobs
from server.generation.off_loop import off_loop
from server.http.sse import StreamFormat, line
from server.prompt.tokenizer import ChatTokenizer
from server.tool_calls.custom import input_json
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

STREAM = StreamFormat("application/x-ndjson", b"", b"", ollama_failure)


def timing_fields(choice: Choice, finish: ChatFinish) -> dict[str, Any]:
    """The reason of the end, token counts, and durations in nanoseconds.

    load_duration is the time in the queue: the model itself is loaded.
    """
    stats = choice.stats
    now = stats.ended or time.monotonic()
    arrived = stats.arrived
    started = stats.started or arrived
    first = stats.first_token or started
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
        "total_duration": _nanoseconds(arrived, now),
        "load_duration": _nanoseconds(arrived, started),
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(started, first),
        "eval_count": stats.generated,
        "eval_duration": _nanoseconds(first, now),
    }


def _nanoseconds(begin: float, end: float) -> int:
    return max(0, round((end - begin) * 1e9))


class OllamaAnswer:
    """Writes one answer, whole or in lines."""

    def __init__(self, model: str, body: OllamaBody, tokenizer: ChatTokenizer) -> None:
        """model: the name that the client uses."""
        self._model = model
        self._tokenizer = tokenizer
        self._chat = isinstance(body, OllamaChatBody)
        self._num_logprobs = body.num_logprobs
        self._call: GeneratedToolCall | None = None  # whose arguments may be incomplete

    async def whole(self, answer: GeneratedAnswer) -> bytes:
        fields = self._fields(answer.content, answer.reasoning, answer.tool_calls)
        end = timing_fields(answer.choice, answer.finish)
        work = CHARS_PER_LOGPROB * len(answer.scored) * (1 + (self._num_logprobs or 0))
        scores = await off_loop(work, lambda: self._logprobs(answer.scored))
        return orjson.dumps(self._head() | fields | scores | end)

    def render(self, choice: Choice, chunk: Chunk) -> bytes:
        """The lines of a chunk."""
        rendered = [self._delta(delta) for delta in chunk.deltas]
        if chunk.finish is not None:
            rendered.append(self._finished_call())
        lines = [fields for fields in rendered if fields is not None]
        scores = self._logprobs(chunk.scored)
        if scores and not lines:
            lines = [self._fields("")]
        data = b""
        for fields in lines:  # log-probabilities are in the first line of their chunk
            data += line(self._head() | fields | scores | {"done": False})
            scores = {}
        if chunk.finish is not None:
            end = timing_fields(choice, chunk.finish)
            data += line(self._head() | self._fields("") | end)
        return data

    def loaded(self) -> bytes:
        """The answer to a request without a prompt, which asks Ollama to load the model."""
        return line(self._head() | self._fields("") | {"done": True, "done_reason": "load"})

    def _head(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def _delta(self, delta: Delta) -> dict[str, Any] | None:
        """A delta's fields; None while a call is incomplete."""
        if isinstance(delta, ContentDelta):
            return self._fields(delta.text)
        if isinstance(delta, ReasoningDelta):
            return self._fields("", delta.text)
        if delta.id is None:
            assert self._call is not None, "arguments without a call"
            self._call.texts.append(delta.arguments)
            return None
        fields = self._finished_call()
        self._call = GeneratedToolCall(delta.id, delta.name or "", [delta.arguments])
        return fields

    def _finished_call(self) -> dict[str, Any] | None:
        call, self._call = self._call, None
        return None if call is None else self._fields("", calls=[call])

    def _fields(
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

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        if self._num_logprobs is None or not scored:
            return {}
        return {"logprobs": chat_logprobs(self._tokenizer, scored, self._num_logprobs)}
