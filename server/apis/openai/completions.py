"""POST /v1/completions, and its answer, whole or in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.answer_schema import COMPLETION, COMPLETION_EVENT
from server.apis.openai.completions_schema import COMPLETION_UNSUPPORTED, CompletionRequest
from server.generation.answer_text import ScoredToken
from server.generation.choice import Choice, Chunk
from server.generation.generated_answer import GeneratedAnswer
from server.generation.generation import Generation
from server.generation.logprobs import (
    CHARS_PER_LOGPROB,
    prompt_logprobs,
    prompt_scored,
    text_logprobs,
)
from server.generation.off_loop import off_loop
from server.generation.sampling_params import eos_ids_of
from server.generation.text_request import CompletionPrompt, submit_texts
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import prefix_salt
from server.http.sse import DeltaFrame, EventStream, FrameSink, FrameWriter, frame, while_connected
from server.http.validation import parse
from server.state import ServerState, state_of

CHARS_OF_ID = 6  # of a token's id and the comma behind it
WRITTEN = 64  # characters written as JSON in the time in which one is tokenized

endpoints = Endpoints("chat and text")
ROUTE = "completions"  # in the request log


@endpoints.post(
    "/v1/completions",
    summary="Continue a text",
    body=CompletionRequest,
    example={"prompt": "The capital of Norway is", "max_tokens": 16},
    answer=COMPLETION,
    stream=COMPLETION_EVENT,
)
async def completions(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(
        request, lambda fields: parse(CompletionRequest, fields, COMPLETION_UNSUPPORTED)
    )
    salt = prefix_salt(request, body.cache_salt)
    generation, prompts = await submit_texts(state, body, salt, ROUTE)
    answer = TextAnswer(state, body, generation, prompts)
    if body.stream:
        return EventStream(answer.stream, generation.close)
    return JsonBody(await while_connected(request.receive, answer.whole(), generation.close))


class TextAnswer:
    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        generation: Generation,
        prompts: list[CompletionPrompt],
    ) -> None:
        self._tokenizer = state.tokenizer
        self._body = body
        self._model_ends = eos_ids_of(body, state.tokenizer)
        self._generation = generation
        self._prompts = prompts
        self._echo_only = body.max_tokens == 0
        self._head: dict[str, object] = {
            "id": f"cmpl-{generation.name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": state.fingerprint(),
        }

    async def whole(self) -> bytes:
        """The JSON of a text_completion."""
        answers = await self._generation.collect()

        def work() -> bytes:
            choices = [  # as JSON: of many log-probabilities not all are objects at once
                orjson.Fragment(orjson.dumps(self._whole_choice(answer) | {"index": index}))
                for index, answer in enumerate(self._best(answers))
            ]
            return orjson.dumps(self._head | {"choices": choices, "usage": self._usage()})

        return await off_loop(self._work(answers), work)

    def _work(self, answers: list[GeneratedAnswer]) -> int:
        """Characters whose tokenization takes as long as writing the answer."""
        body = self._body
        top = max(body.logprobs or 0, body.prompt_logprobs or 0, len(body.reported_ids()))
        tokens = sum([len(answer.scored) for answer in answers])
        tokens += sum([len(choice.prompt_scores or ()) for choice in self._generation.choices])
        returned = 0  # characters: each of 128 copies returns the prompt again
        for prompt in self._prompts:
            returned += len(prompt.text) if body.echo else 0
            returned += CHARS_OF_ID * len(prompt.tokens) if body.return_token_ids else 0
        return CHARS_PER_LOGPROB * tokens * (1 + top) + returned * body.copies // WRITTEN

    def _best(self, answers: list[GeneratedAnswer]) -> list[GeneratedAnswer]:
        """Of the copies of each prompt the `n` whose tokens are likeliest on average."""
        copies, n = self._body.copies, self._body.n or 1
        if copies == n:
            return answers
        best: list[GeneratedAnswer] = []
        for first in range(0, len(answers), copies):
            group = answers[first : first + copies]
            best += sorted(group, key=lambda answer: -_likelihood(answer.scored))[:n]
        return best

    def _whole_choice(self, answer: GeneratedAnswer) -> dict[str, Any]:
        choice = answer.choice
        if self._echo_only:
            answer = GeneratedAnswer(choice, finish="length")
        text = self._echoed(choice) + answer.content
        entry = self._choice(choice, text, answer, finish=answer.finish, first=True)
        if self._body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, choice.prompt, choice.prompt_scores, self._body.prompt_logprobs
            )
        return entry

    async def stream(self, writer: FrameWriter) -> None:
        """Write text, finish and usage chunks."""
        body = self._body
        only_text = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)

        def sink(choice: Choice) -> FrameSink[Chunk]:
            delta: DeltaFrame | None = None

            def render(chunk: Chunk) -> bytes:
                nonlocal delta
                if self._echo_only:
                    chunk = Chunk((), (), chunk.finish and "length", [])
                text, first = chunk.text, delta is None
                if delta is None:
                    delta = DeltaFrame(self._chunk(self._choice(choice, DeltaFrame.MARK)))
                    text = self._echoed(choice) + text
                data = b""
                if not only_text:
                    entry = self._choice(choice, text, chunk, first=first)
                    logprobs = entry["logprobs"]
                    if text or entry.get("token_ids") or (logprobs and logprobs["tokens"]):
                        data = frame(self._chunk(entry))
                elif text:
                    data = delta.of(text)
                if chunk.finish is not None:
                    data += frame(self._chunk(self._choice(choice, "", finish=chunk.finish)))
                return data

            return FrameSink(writer, render)

        await self._generation.stream([sink(choice) for choice in self._generation.choices])
        if body.include_usage:
            tail: dict[str, object] = {"choices": [], "usage": self._usage()}
            await writer.write(frame(self._head | tail))

    def _echoed(self, choice: Choice) -> str:
        prompt = self._prompts[choice.index // self._body.copies]
        return prompt.text if self._body.echo else ""

    def _usage(self) -> dict[str, object]:
        return self._generation.usage(0 if self._echo_only else None)

    def _logprobs(
        self, choice: Choice, scored: Sequence[ScoredToken], *, first: bool
    ) -> dict[str, Any] | None:
        top = self._body.logprobs
        if top is None:
            return None
        start = len(self._echoed(choice))
        reported = len(self._body.reported_ids()) or top
        as_ids = bool(self._body.return_tokens_as_token_ids)
        answer: dict[str, Any] = text_logprobs(
            self._tokenizer, scored, reported, start, as_ids=as_ids
        )
        if self._body.echo and first and choice.prompt_scores is not None:
            before = prompt_scored(self._tokenizer, choice.prompt, choice.prompt_scores)
            echoed: dict[str, Any] = text_logprobs(self._tokenizer, before, top, 0, as_ids=as_ids)
            answer = {key: echoed[key] + answer[key] for key in answer}
        return answer

    def _choice(
        self,
        choice: Choice,
        text: str,
        part: Chunk | GeneratedAnswer | None = None,
        *,
        finish: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """part: what log-probabilities and token ids are of; first: those of the prompt as well"""
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": part and self._logprobs(choice, part.scored, first=first),
            "finish_reason": finish,
        }
        if part is not None and self._body.return_token_ids:
            entry["token_ids"] = part.tokens
            if first:
                entry["prompt_token_ids"] = choice.prompt
        if finish is not None:
            reason = None if self._echo_only else choice.stop_reason(self._model_ends)
            entry["stop_reason"] = reason
            if self._body.timings:
                entry["timings"] = choice.stats.timings()
        return entry

    def _chunk(self, choice: dict[str, Any]) -> dict[str, object]:
        chunk = self._head | {"choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = self._usage() if self._body.continuous_usage else None
        return chunk


def _likelihood(scored: Sequence[ScoredToken]) -> float:
    """The mean log-probability of the tokens; an answer without any is the least likely."""
    scores = [entry.score.logprob for entry in scored if entry.score]
    return sum(scores) / len(scores) if scores else -math.inf
