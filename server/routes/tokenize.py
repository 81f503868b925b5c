"""POST /tokenize and POST /detokenize, also under /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.conversation import check_messages, template_messages
from server.generation import require_ready
from server.parameters import check_chars, check_token_ids
from server.routes.body import off_loop, read_checked
from server.schema.base import parse
from server.schema.chat import check_parts
from server.schema.sampling import openapi_body
from server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from server.state import state_of

router = APIRouter()


@router.post("/v1/tokenize", include_in_schema=False, response_model=None)
@router.post(
    "/tokenize",
    summary="Text or messages to token ids",
    response_model=None,
    openapi_extra=openapi_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(request, checked)
    if body.model is not None:
        state.check_model(body.model)
    ready = require_ready(state)
    tokenizer = state.tokenizer
    if body.messages is not None:
        check_messages(body.messages)
        messages = template_messages(body.messages, tokenizer)
        num_chars = sum(len(message["content"] or "") for message in messages)
    else:
        messages = []
        num_chars = len(body.prompt or "")
    check_chars(num_chars, tokenizer, ready, "prompt" if body.messages is None else "messages")

    def work() -> list[int]:
        if body.messages is None:
            special = body.add_special_tokens is not False
            return tokenizer.encode(body.prompt or "", add_special_tokens=special)
        text = tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            max_chars=(ready.max_model_len + 1) * tokenizer.longest_token + num_chars,
        )
        return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

    tokens = await off_loop(num_chars, work)
    answer: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": ready.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.tokenizer.id_to_token(token) for token in tokens]
    return JSONResponse(answer)


def checked(fields: dict[str, Any]) -> TokenizeRequest:
    """Raises RequestError that names the wrong field."""
    check_parts(fields)
    body = parse(TokenizeRequest, fields)
    body.check()
    return body


@router.post("/v1/detokenize", include_in_schema=False, response_model=None)
@router.post(
    "/detokenize",
    summary="Token ids to text",
    response_model=None,
    openapi_extra=openapi_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_checked(request, lambda fields: parse(DetokenizeRequest, fields))
    if body.model is not None:
        state.check_model(body.model)
    ready = require_ready(state)
    check_token_ids(body.tokens, ready.vocab_size, "tokens")

    def work() -> str:
        return state.tokenizer.decode(body.tokens, skip_special=False)

    return JSONResponse({"prompt": await off_loop(len(body.tokens), work)})
