"""Answers to chat requests as OpenAI writes them, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from server.generation.chat_request import ChatTurn, GeneratedAnswer, GeneratedToolCall, ParsedChunk
from server.generation.choice import Choice, ScoredToken
from server.generation.logprobs import CHARS_PER_LOGPROB, chat_logprobs, prompt_logprobs
from server.generation.off_loop import off_loop
from server.generation.request_log import timings
from server.generation.sampling_params import eos_ids_of
from server.http.sse import DeltaFrame, EventWriter, frame
from server.state import ServerState
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

Keep = Callable[[dict[str, Any]], Awaitable[None]]


class ChatAnswer:
    """Writes the answer to one chat request, whole or in chunks."""

    def __init__(self, state: ServerState, turn: ChatTurn, keep: Keep | None = None) -> None:
        """`keep(answer)` is awaited at the end, where the answer shall be stored."""
        self._keep = keep
        self._tokenizer = state.tokenizer
        self._body = turn.body
        self._model_ends = eos_ids_of(turn.body, state.tokenizer)
        self._turn = turn
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{turn.generation.name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": turn.body.model,
            "system_fingerprint": state.fingerprint(),
        }
        if turn.body.service_tier is not None:
            self._head["service_tier"] = "default"

    async def whole(self) -> bytes:
        """The JSON of a chat.completion."""
        whole = await self._completion(await self._turn.collect())
        if self._keep is not None:
            await self._keep(whole)
        return orjson.dumps(whole)

    async def _completion(self, answers: list[GeneratedAnswer]) -> dict[str, Any]:
        """With choices as fragments of JSON: of many log-probabilities not all are objects at once,
        and other streams go on between two choices."""
        body = self._body
        tokens = sum([len(answer.scored) for answer in answers])
        tokens += len(answers[0].choice.prompt_scores or ())
        top = max(body.top_logprobs or 0, body.prompt_logprobs or 0, len(body.reported_ids()))
        work = CHARS_PER_LOGPROB * tokens * (1 + top)
        return await off_loop(work, lambda: self._built(answers))

    def _built(self, answers: list[GeneratedAnswer]) -> dict[str, Any]:
        whole = self._head | {
            "choices": [orjson.Fragment(orjson.dumps(self._choice(each))) for each in answers],
            "usage": self._turn.usage(),
        }
        if self._body.prompt_logprobs is not None:
            first = answers[0].choice
            scores = prompt_logprobs(
                self._tokenizer, first.prompt, first.prompt_scores, self._body.prompt_logprobs
            )
            whole["prompt_logprobs"] = orjson.Fragment(orjson.dumps(scores))
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = answers[0].choice.prompt
        if self._keep is not None:
            whole["metadata"] = self._body.metadata or {}
        return whole

    def _choice(self, answer: GeneratedAnswer) -> dict[str, object]:
        content, reasoning = answer.content, answer.reasoning
        message: dict[str, object] = {
            "role": "assistant",
            # OpenAI's null: an answer that only calls tools has no content.
            "content": None if answer.tool_calls and not content else content,
            "refusal": None,
        }
        if reasoning and self._body.include_reasoning is not False:
            message |= _reasoning(reasoning)
        if answer.tool_calls:
            message["tool_calls"] = [_call(call) for call in answer.tool_calls]
        entry: dict[str, object] = {
            "index": answer.choice.index,
            "message": message,
            "logprobs": self._logprobs(answer.scored),
            "finish_reason": answer.finish,
            "stop_reason": answer.choice.stop_reason(self._model_ends),
        }
        if self._body.return_token_ids:
            entry["token_ids"] = answer.tokens
        if self._body.timings:
            entry["timings"] = timings(answer.choice)
        return entry

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        top = len(self._body.reported_ids()) or self._body.top_logprobs or 0
        as_ids = bool(self._body.return_tokens_as_token_ids)
        content = chat_logprobs(self._tokenizer, scored, top, as_ids=as_ids)
        return {"content": content, "refusal": None}

    async def stream(self, writer: EventWriter) -> None:
        """Write role, content, finish and usage chunks."""
        head = self._head
        self._head = head | {"object": "chat.completion.chunk"}
        answers = [GeneratedAnswer(choice) for choice in self._turn.choices] if self._keep else []
        contents: dict[int, DeltaFrame] = {}

        def render(choice: Choice, part: ParsedChunk) -> bytes:
            data = b""
            if answers:
                answers[choice.index].add(part)
            content = contents.get(choice.index)
            if content is None:
                content = DeltaFrame(self._chunk(choice, {"content": DeltaFrame.MARK}))
                contents[choice.index] = content
                first = self._chunk(choice, {"role": "assistant", "content": ""})
                if self._body.return_token_ids:
                    first["prompt_token_ids"] = choice.prompt
                data = frame(first)
            data += self._deltas(choice, part, content)
            if part.finish is not None:
                data += frame(self._chunk(choice, {}, finish=part.finish))
            return data

        await self._turn.stream(render, writer.write, writer.write_now)
        if self._keep is not None:
            await self._keep(await self._completion(answers) | head)
        if self._body.include_usage:
            tail: dict[str, object] = {"choices": [], "usage": self._turn.usage()}
            await writer.write(frame(self._head | tail))

    def _deltas(self, choice: Choice, part: ParsedChunk, content: DeltaFrame) -> bytes:
        body = self._body
        if body.include_reasoning is False:
            part = without_reasoning(part)
        if body.logprobs or body.return_token_ids or body.continuous_usage:
            return self._detailed_deltas(choice, part)
        return b"".join(
            [
                content.of(delta.text)
                if isinstance(delta, ContentDelta)
                else frame(self._chunk(choice, delta_of(delta)))
                for delta in part.deltas
            ]
        )

    def _detailed_deltas(self, choice: Choice, part: ParsedChunk) -> bytes:
        """Log-probabilities and token ids travel with the first delta of their Output."""
        deltas, scored = part.deltas, part.scored
        tokens = list(part.tokens) if self._body.return_token_ids else []
        if not deltas and (scored or tokens):
            deltas = [ContentDelta("")]
        data = b""
        for delta in deltas:
            chunk = self._chunk(choice, delta_of(delta), logprobs=self._logprobs(scored))
            if self._body.return_token_ids:
                chunk["choices"][0]["token_ids"] = tokens
            data += frame(chunk)
            scored, tokens = [], []
        return data

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, object],
        *,
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        part: dict[str, object] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if finish is not None:
            part["stop_reason"] = choice.stop_reason(self._model_ends)
            if self._body.timings:
                part["timings"] = timings(choice)
        chunk: dict[str, Any] = self._head | {"choices": [part]}
        if self._body.include_usage:
            chunk["usage"] = self._turn.usage() if self._body.continuous_usage else None
        return chunk


def _call(made: GeneratedToolCall) -> dict[str, object]:
    if made.custom:
        custom = {"name": made.name, "input": made.arguments}
        return {"id": made.id, "type": "custom", "custom": custom}
    function = {"name": made.name, "arguments": made.arguments}
    return {"id": made.id, "type": "function", "function": function}


def without_reasoning(part: ParsedChunk) -> ParsedChunk:
    shown = [delta for delta in part.deltas if not isinstance(delta, ReasoningDelta)]
    return part._replace(deltas=shown)


def delta_of(delta: Delta) -> dict[str, object]:
    """The `delta` of a chunk."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return _reasoning(delta.text)
    call: dict[str, object] = {"index": delta.index}
    if delta.custom:
        custom = {"name": delta.name, "input": delta.arguments}
        return {"tool_calls": [call | {"id": delta.id, "type": "custom", "custom": custom}]}
    function: dict[str, object] = {"arguments": delta.arguments}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, **function}
    return {"tool_calls": [call | {"function": function}]}


def _reasoning(text: str) -> dict[str, object]:
    """Under both names that clients read: vLLM's, and that of SGLang and DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}
