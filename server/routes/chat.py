"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.messages import Ready, SamplingParams
from server.choice import Choice, Piece
from server.conversation import check_messages, template_messages
from server.generation import Generation, require_ready
from server.logprobs import chat_logprobs, prompt_logprobs
from server.parameters import check_chars, fit_to_context, sampling_params
from server.routes.body import off_loop, read_body
from server.schema.base import parse
from server.schema.chat import CHAT_UNSUPPORTED, ChatRequest, refuse_media
from server.schema.sampling import openapi_body
from server.sse import DeltaFrame, EventStream, EventWriter, frame, while_connected
from server.state import ServerState, prefix_salt, state_of

router = APIRouter()
ROUTE = "chat"


@router.post(
    "/v1/chat/completions",
    summary="Continue a conversation",
    response_model=None,
    openapi_extra=openapi_body(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    fields = await read_body(request)
    refuse_media(fields)
    body = parse(ChatRequest, fields, CHAT_UNSUPPORTED)
    body.check()
    check_messages(body.messages)
    state.check_model(body.model)
    ready = require_ready(state)
    prompt = await _prompt(state, ready, body)
    params = _params(state, ready, body, prompt)
    salt = prefix_salt(request, body.cache_salt)
    generation = Generation(state, ROUTE, body, [prompt], [params], salt)
    answer = ChatAnswer(state, body, generation)
    if body.stream:
        return EventStream(answer.stream, generation.close)
    try:
        whole = await while_connected(request.receive, answer.whole())
    finally:
        generation.close()
    return Response(whole, media_type="application/json")


async def _prompt(state: ServerState, ready: Ready, body: ChatRequest) -> list[int]:
    tokenizer = state.tokenizer
    messages = template_messages(body.messages, tokenizer)
    num_chars = sum(len(message["content"] or "") for message in messages)
    check_chars(num_chars, tokenizer, ready, "messages")
    going_on = bool(body.continue_final_message)

    def work() -> list[int]:
        text = tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not going_on,
            continue_final_message=going_on,
            max_chars=(ready.max_model_len + 1) * tokenizer.longest_token + num_chars,
            extra=body.chat_template_kwargs,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    return await off_loop(num_chars, work)


def _params(
    state: ServerState, ready: Ready, body: ChatRequest, prompt: list[int]
) -> SamplingParams:
    max_tokens = fit_to_context(
        len(prompt), body.limit(), ready.max_model_len, body.model, "messages"
    )
    return sampling_params(
        body,
        state.tokenizer,
        ready,
        max_tokens=max_tokens,
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
    )


class ChatAnswer:
    """Writes the answer to one chat request, whole or in chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, generation: Generation) -> None:
        self._tokenizer = state.tokenizer
        self._body = body
        self._generation = generation
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": state.fingerprint(),
        }

    async def whole(self) -> bytes:
        """The JSON of a chat.completion."""
        generation = self._generation
        pieces = await generation.collect()
        answer = self._head | {
            "choices": [
                self._choice(choice, pieces[choice.index]) for choice in generation.choices
            ],
            "usage": generation.usage(),
        }
        if self._body.prompt_logprobs is not None:
            first = generation.choices[0]
            answer["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, first.prompt, first.prompt_scores, self._body.prompt_logprobs
            )
        return orjson.dumps(answer)

    def _choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, object]:
        text = "".join([piece.text for piece in pieces])
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(*pieces),
            "finish_reason": choice.finish,
        }

    def _logprobs(self, *pieces: Piece) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        scored = [entry for piece in pieces for entry in piece.scored]
        return chat_logprobs(self._tokenizer, scored, self._body.top_logprobs or 0)

    async def stream(self, writer: EventWriter) -> None:
        """Write role, content, finish and usage chunks."""
        self._head["object"] = "chat.completion.chunk"
        deltas: dict[int, DeltaFrame] = {}
        with_logprobs = bool(self._body.logprobs)

        def render(choice: Choice, piece: Piece) -> bytes:
            data = b""
            delta_frame = deltas.get(choice.index)
            if delta_frame is None:
                delta_frame = DeltaFrame(self._chunk(choice, {"content": DeltaFrame.MARK}))
                deltas[choice.index] = delta_frame
                data = frame(self._chunk(choice, {"role": "assistant", "content": ""}))
            if with_logprobs and (piece.text or piece.scored):
                delta = {"content": piece.text}
                data += frame(self._chunk(choice, delta, logprobs=self._logprobs(piece)))
            elif piece.text:
                data += delta_frame.of(piece.text)
            if piece.finish is not None:
                data += frame(self._chunk(choice, {}, finish=piece.finish))
            return data

        await self._generation.stream(render, writer.write)
        if self._body.include_usage:
            tail: dict[str, object] = {"choices": [], "usage": self._generation.usage()}
            await writer.write(frame(self._head | tail))

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, str],
        *,
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        part = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        chunk: dict[str, Any] = self._head | {"choices": [part]}
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk
