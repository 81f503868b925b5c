"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import Ready, SamplingParams
from server.choice import Choice, Piece
from server.generation import Generation, require_ready
from server.logprobs import prompt_logprobs, prompt_scored, text_logprobs
from server.parameters import check_chars, check_token_ids, fit_to_context, sampling_params
from server.routes.body import off_loop, read_body
from server.schema.base import parse
from server.schema.completions import COMPLETION_UNSUPPORTED, CompletionRequest
from server.schema.sampling import openapi_body
from server.sse import DeltaFrame, EventStream, EventWriter, frame, while_connected
from server.state import ServerState, prefix_salt, state_of

router = APIRouter()
ROUTE = "completions"


@dataclass(frozen=True)
class Prompt:
    text: str  # what `echo` returns
    tokens: list[int]


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_model=None,
    openapi_extra=openapi_body(CompletionRequest),
)
async def completions(request: Request) -> Response:
    state = state_of(request)
    body = parse(CompletionRequest, await read_body(request), COMPLETION_UNSUPPORTED)
    body.check()
    state.check_model(body.model)
    ready = require_ready(state)
    prompts = await _prompts(state, ready, body)
    params = [_params(state, ready, body, prompt.tokens) for prompt in prompts]
    tokens = [prompt.tokens for prompt in prompts]
    salt = prefix_salt(request, body.cache_salt)
    generation = Generation(state, ROUTE, body, tokens, params, salt)
    answer = TextAnswer(state, body, generation, prompts)
    if body.stream:
        return EventStream(answer.stream, generation.close)
    try:
        whole = await while_connected(request.receive, answer.whole())
    finally:
        generation.close()
    return Response(whole, media_type="application/json")


async def _prompts(state: ServerState, ready: Ready, body: CompletionRequest) -> list[Prompt]:
    tokenizer = state.tokenizer
    given = body.prompts()
    num_chars = sum(len(prompt) for prompt in given)
    for prompt in given:
        if isinstance(prompt, str):
            check_chars(len(prompt), tokenizer, ready, "prompt")
        else:
            check_token_ids(prompt, ready.vocab_size, "prompt")
    special = body.add_special_tokens is not False

    def work() -> list[Prompt]:
        return [
            Prompt(prompt, tokenizer.encode(prompt, add_special_tokens=special))
            if isinstance(prompt, str)
            else Prompt(tokenizer.decode(prompt, skip_special=False) if body.echo else "", prompt)
            for prompt in given
        ]

    return await off_loop(num_chars, work)


def _params(
    state: ServerState, ready: Ready, body: CompletionRequest, prompt: list[int]
) -> SamplingParams:
    max_tokens = fit_to_context(
        len(prompt), body.limit(), ready.max_model_len, body.model, "prompt"
    )
    wanted = body.prompt_logprobs
    if wanted is None and body.echo and body.logprobs is not None:
        wanted = body.logprobs
    return sampling_params(
        body,
        state.tokenizer,
        ready,
        # The engine makes at least one token; for max_tokens 0 it is thrown away.
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=wanted,
    )


class TextAnswer:
    """Writes the answer to one completion request, whole or in chunks."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        generation: Generation,
        prompts: list[Prompt],
    ) -> None:
        self._tokenizer = state.tokenizer
        self._body = body
        self._generation = generation
        self._prompts = prompts
        self._echo_only = body.max_tokens == 0
        self._head: dict[str, object] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": state.fingerprint(),
        }

    async def whole(self) -> bytes:
        """The JSON of a text_completion."""
        pieces = await self._generation.collect()
        choices = [
            self._whole_choice(choice, pieces[choice.index]) for choice in self._generation.choices
        ]
        return orjson.dumps(self._head | {"choices": choices, "usage": self._usage()})

    def _whole_choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, object]:
        text = "".join([self._text(piece) for piece in pieces])
        entry = self._choice(
            choice,
            self._echoed(choice) + text,
            logprobs=self._logprobs(choice, pieces, first=True),
            finish=self._finish(choice.finish),
        )
        if self._body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, choice.prompt, choice.prompt_scores, self._body.prompt_logprobs
            )
        return entry

    async def stream(self, writer: EventWriter) -> None:
        """Write text, finish and usage chunks."""
        deltas: dict[int, DeltaFrame] = {}
        with_logprobs = self._body.logprobs is not None

        def render(choice: Choice, piece: Piece) -> bytes:
            first = choice.index not in deltas
            if first:
                mark = self._chunk(self._choice(choice, DeltaFrame.MARK))
                deltas[choice.index] = DeltaFrame(mark)
            text = (self._echoed(choice) if first else "") + self._text(piece)
            data = b""
            if with_logprobs:
                logprobs = self._logprobs(choice, [piece], first=first)
                if text or (logprobs and logprobs["tokens"]):
                    data = frame(self._chunk(self._choice(choice, text, logprobs=logprobs)))
            elif text:
                data = deltas[choice.index].of(text)
            if piece.finish is not None:
                finish = self._finish(piece.finish)
                data += frame(self._chunk(self._choice(choice, "", finish=finish)))
            return data

        await self._generation.stream(render, writer.write)
        if self._body.include_usage:
            tail: dict[str, object] = {"choices": [], "usage": self._usage()}
            await writer.write(frame(self._head | tail))

    def _text(self, piece: Piece) -> str:
        return "" if self._echo_only else piece.text

    def _finish(self, finish: str | None) -> str | None:
        return "length" if self._echo_only and finish is not None else finish

    def _prompt_of(self, choice: Choice) -> Prompt:
        return self._prompts[choice.index // (self._body.n or 1)]

    def _echoed(self, choice: Choice) -> str:
        return self._prompt_of(choice).text if self._body.echo else ""

    def _usage(self) -> dict[str, object]:
        return self._generation.usage(0 if self._echo_only else None)

    def _logprobs(
        self, choice: Choice, pieces: list[Piece], *, first: bool
    ) -> dict[str, Any] | None:
        top = self._body.logprobs
        if top is None:
            return None
        scored = [] if self._echo_only else [entry for piece in pieces for entry in piece.scored]
        start = len(self._echoed(choice))
        answer: dict[str, Any] = text_logprobs(self._tokenizer, scored, top, start)
        if self._body.echo and first and choice.prompt_scores is not None:
            before = prompt_scored(self._tokenizer, choice.prompt, choice.prompt_scores)
            echoed: dict[str, Any] = text_logprobs(self._tokenizer, before, top, 0)
            answer = {key: echoed[key] + answer[key] for key in answer}
        return answer

    def _choice(
        self,
        choice: Choice,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, object]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
        }

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        chunk = self._head | {"choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk
