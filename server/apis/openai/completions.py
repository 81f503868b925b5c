"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.apis.openai.completions_answer import TextAnswer
from server.apis.openai.completions_schema import COMPLETION_UNSUPPORTED, CompletionRequest
from server.apis.openai.sampling_schema import openapi_body
from server.generation.text_request import submit_texts
from server.http.json_body import JsonBody, read_checked
from server.http.request_context import prefix_salt
from server.http.sse import EventStream, while_connected
from server.http.validation import parse
from server.state import state_of

router = APIRouter()
ROUTE = "completions"  # as records of requests say


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_model=None,
    openapi_extra=openapi_body(CompletionRequest),
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
