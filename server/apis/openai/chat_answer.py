"""Answers to chat requests as OpenAI writes them, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from server.apis.openai.chat_schema import ChatRequest
from server.generation.answer_text import ScoredToken
from server.generation.choice import Choice, Chunk
from server.generation.generated_answer import GeneratedAnswer, GeneratedToolCall
from server.generation.generation import Generation
from server.generation.logprobs import CHARS_PER_LOGPROB, chat_logprobs, prompt_logprobs
from server.generation.off_loop import off_loop
from server.generation.sampling_params import eos_ids_of
from server.http.sse import DeltaFrame, FrameSink, FrameWriter, frame
from server.state import ServerState
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

REASONING_PARTS = ("reasoning", "mark")
Keep = Callable[[dict[str, Any]], Awaitable[None]]


class ChatAnswer:
    def __init__(
        self,
        state: ServerState,
        body: ChatRequest,
        generation: Generation,
        keep: Keep | None = None,
    ) -> None:
        """keep: stores the answer at its end"""
        self._keep = keep
        self._tokenizer = state.tokenizer
        self._body = body
        self._model_ends = eos_ids_of(body, state.tokenizer)
        # Chunks have more than text: log-probabilities, token ids or usage of their RequestOutput.
        self._detailed = bool(body.logprobs or body.return_token_ids or body.continuous_usage)
        self._generation = generation
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{generation.name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": state.fingerprint(),
        }
        if body.service_tier is not None:
            self._head["service_tier"] = "default"

    async def whole(self) -> bytes:
        """The JSON of a chat.completion."""
        completion = await self._completion(await self._generation.collect())
        if self._keep is not None:
            await self._keep(completion)
        return orjson.dumps(completion)

    async def _completion(self, answers: list[GeneratedAnswer]) -> dict[str, Any]:
        """With choices as fragments of JSON: of many log-probabilities not all are objects at once,
        and other streams go on between two choices."""
        body, first = self._body, answers[0].choice
        tokens = sum([len(answer.scored) for answer in answers]) + len(first.prompt_scores or ())
        top = max(body.top_logprobs or 0, body.prompt_logprobs or 0, len(body.reported_ids()))

        def work() -> dict[str, Any]:
            whole = self._head | {
                "choices": [orjson.Fragment(orjson.dumps(self._choice(each))) for each in answers],
                "usage": self._generation.usage(),
            }
            if body.prompt_logprobs is not None:
                scores = prompt_logprobs(
                    self._tokenizer, first.prompt, first.prompt_scores, body.prompt_logprobs
                )
                whole["prompt_logprobs"] = orjson.Fragment(orjson.dumps(scores))
            if body.return_token_ids:
                whole["prompt_token_ids"] = first.prompt
            if self._keep is not None:
                whole["metadata"] = body.metadata or {}
            return whole

        return await off_loop(CHARS_PER_LOGPROB * tokens * (1 + top), work)

    def _choice(self, answer: GeneratedAnswer) -> dict[str, object]:
        content, reasoning, scored = answer.content, answer.reasoning, self._shown(answer.scored)
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
            "logprobs": self._logprobs(scored),
            "finish_reason": answer.finish,
            "stop_reason": answer.choice.stop_reason(self._model_ends),
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [each.token for each in scored]
        if self._body.timings:
            entry["timings"] = answer.choice.stats.timings()
        return entry

    def _shown(self, scored: Sequence[ScoredToken]) -> Sequence[ScoredToken]:
        """Without those of reasoning that is left out."""
        if self._body.include_reasoning is not False:
            return scored
        return [each for each in scored if each.part not in REASONING_PARTS]

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        top = len(self._body.reported_ids()) or self._body.top_logprobs or 0
        as_ids = bool(self._body.return_tokens_as_token_ids)
        content = chat_logprobs(self._tokenizer, scored, top, as_ids=as_ids)
        return {"content": content, "refusal": None}

    async def stream(self, writer: FrameWriter) -> None:
        """Write role, content, finish and usage chunks."""
        head = self._head
        self._head = head | {"object": "chat.completion.chunk"}
        choices = self._generation.choices
        answers = [GeneratedAnswer(choice) for choice in choices] if self._keep else []

        def sink(choice: Choice) -> FrameSink[Chunk]:
            content: DeltaFrame | None = None

            def render(chunk: Chunk) -> bytes:
                nonlocal content
                data = b""
                if answers:
                    answers[choice.index].put(chunk)
                if content is None:
                    content = DeltaFrame(self._chunk(choice, {"content": DeltaFrame.MARK}))
                    first = self._chunk(choice, {"role": "assistant", "content": ""})
                    if self._body.return_token_ids:
                        first["prompt_token_ids"] = choice.prompt
                    data = frame(first)
                data += self._deltas(choice, chunk, content)
                if chunk.finish is not None:
                    data += frame(self._chunk(choice, {}, finish=chunk.finish))
                return data

            return FrameSink(writer, render)

        await self._generation.stream([sink(choice) for choice in choices])
        if self._keep is not None:
            await self._keep(await self._completion(answers) | head)
        if self._body.include_usage:
            tail: dict[str, object] = {"choices": [], "usage": self._generation.usage()}
            await writer.write(frame(self._head | tail))

    def _deltas(self, choice: Choice, parsed: Chunk, content: DeltaFrame) -> bytes:
        body = self._body
        deltas = [part for delta in parsed.deltas for part in _parts(delta)]
        if body.include_reasoning is False:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        if not self._detailed:
            return b"".join(
                [
                    content.of(delta.text)
                    if isinstance(delta, ContentDelta)
                    else frame(self._chunk(choice, _delta(delta)))
                    for delta in deltas
                ]
            )
        # Log-probabilities and token ids travel with the first delta of their chunk: those of
        # reasoning with the first of reasoning, all others with the first of content or a call.
        shown = self._shown(parsed.scored)
        thought = [each for each in shown if each.part in REASONING_PARTS]
        others = [each for each in shown if each.part not in REASONING_PARTS]
        is_thought = [isinstance(delta, ReasoningDelta) for delta in deltas]
        if thought and not any(is_thought):
            deltas = [ReasoningDelta(""), *deltas]
        if others and all(is_thought):
            deltas = [*deltas, ContentDelta("")]
        data = b""
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                scored, thought = thought, []
            else:
                scored, others = others, []
            chunk = self._chunk(choice, _delta(delta), logprobs=self._logprobs(scored))
            if body.return_token_ids:
                chunk["choices"][0]["token_ids"] = [each.token for each in scored]
            data += frame(chunk)
        return data

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, object],
        *,
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        entry: dict[str, object] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if finish is not None:
            entry["stop_reason"] = choice.stop_reason(self._model_ends)
            if self._body.timings:
                entry["timings"] = choice.stats.timings()
        chunk: dict[str, Any] = self._head | {"choices": [entry]}
        if self._body.include_usage:
            chunk["usage"] = self._generation.usage() if self._body.continuous_usage else None
        return chunk


def _call(call: GeneratedToolCall) -> dict[str, object]:
    if call.custom:
        custom = {"name": call.name, "input": call.arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _parts(delta: Delta) -> Sequence[Delta]:
    """A call's id and name without arguments, as in OpenAI's streams, then its arguments."""
    if isinstance(delta, ToolCallDelta) and delta.id and delta.arguments and not delta.custom:
        return replace(delta, arguments=""), ToolCallDelta(delta.index, delta.arguments)
    return (delta,)


def _delta(delta: Delta) -> dict[str, object]:
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
