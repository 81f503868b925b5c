"""POST /tokenize and POST /detokenize, also under /v1."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat_service import chat_prompt
from server.generation import require_ready
from server.off_loop import off_loop
from server.parameters import check_chars, check_token_ids
from server.routes.body import Json, read_checked
from server.schema.base import parse
from server.schema.chat import CHAT_UNSUPPORTED
from server.schema.content import check_parts
from server.schema.sampling import openapi_body
from server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from server.state import state_of

router = APIRouter()
UNSUPPORTED = {
    name: CHAT_UNSUPPORTED[name] for name in ("chat_template", "documents", "mm_processor_kwargs")
}


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
    tokenizer = state.tokenizer
    if body.messages is not None:
        chat = body.chat(body.model or state.config.served_names[0])
        ready, tokens = await chat_prompt(state, chat)
    else:
        ready, text = require_ready(state), body.prompt or ""
        check_chars(len(text), tokenizer, ready, "prompt")
        special = body.add_special_tokens is not False
        tokens = await off_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
        )

    def work() -> bytes:
        spelled = None
        if body.return_token_strs:
            spelled = [tokenizer.tokenizer.id_to_token(token) for token in tokens]
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": ready.max_model_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
        return orjson.dumps(answer)

    return Json(await off_loop(len(tokens), work))


def checked(fields: dict[str, Any]) -> TokenizeRequest:
    """Raises RequestError that names the wrong field."""
    check_parts(fields)
    body = parse(TokenizeRequest, fields, UNSUPPORTED)
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

    def work() -> bytes:
        check_token_ids(body.tokens, ready.vocab_size, "tokens")
        return orjson.dumps({"prompt": state.tokenizer.decode(body.tokens, skip_special=False)})

    return Json(await off_loop(len(body.tokens), work))
