"""An endpoint in one declaration: its route, and what the OpenAPI document says about it.

    endpoints = Endpoints("chat and text")

    @endpoints.post("/v1/...", summary=..., body=ChatRequest, example={...}, answer=CHAT)
    async def chat_completions(request: Request) -> Response: ...

FastAPI only routes, and hands over the parameters in a path: a handler reads its own body and
query, and writes its own answer.  server/http/openapi.py makes the document of the declarations.
A declaration that lacks what the document needs fails an assertion when its module is imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Required, TypedDict, TypeVar, Unpack

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http.openapi_parts import ERROR, TEXT, Schema, object_of, or_null, word
from server.http.validation import Body

Method = Literal["get", "post", "delete"]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
CONVERTOR = re.compile(r":\w+(?=})")  # of a path's parameter: {name:path}


class ErrorFormat(Enum):
    """The form of an error: its name and its schema in the document."""

    OPENAI = ("Error", ERROR)
    ANTHROPIC = (
        "AnthropicError",
        object_of(
            type=word("error"),
            error=object_of(type=TEXT, message=TEXT),
            request_id=or_null(TEXT),
        ),
    )
    OLLAMA = ("OllamaError", object_of(error=TEXT))


class Declaration(TypedDict, total=False):
    """What an endpoint takes and answers with."""

    summary: Required[str]
    answer: Required[Schema]  # may have more fields than it names: those that were requested
    media_type: str  # of the answer; application/json if left out
    stream: Schema  # one event of text/event-stream or one line of application/x-ndjson
    query: type[Body]
    body: type[Body]  # JSON
    body_fields: Collection[str]  # those of `body` that are taken, if not all
    example: Mapping[str, Any]  # a body for /docs to begin with, without the name of the model
    form: Schema  # a body of multipart/form-data


@dataclass(frozen=True)
class Endpoint:
    method: Method
    path: str  # with the names of its parameters in braces
    handler: Callable[..., Awaitable[Response]]
    declared: Declaration

    def __post_init__(self) -> None:
        declared, at = self.declared, f"{self.method} {self.path}"
        assert declared.get("summary") and declared.get("answer"), f"{at}: summary and answer"
        assert ("body" in declared) == ("example" in declared), f"{at}: a body and an example of it"
        assert ("stream" in declared) == self._may_stream(), f"{at}: a field and a schema `stream`"
        # FastAPI would read a parameter of the handler that the path lacks from the query.
        parameters = inspect.signature(self.handler, eval_str=True).parameters.values()
        taken = {each.name for each in parameters if each.annotation is not Request}
        wrong = taken ^ set(self.path_parameters())
        assert not wrong, f"{at}: the handler takes the path's parameters, not {wrong}"

    def path_parameters(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    def _may_stream(self) -> bool:
        declared = self.declared
        body, query = declared.get("body", Body), declared.get("query", Body)
        return "stream" in (declared.get("body_fields") or body.model_fields) or (
            "stream" in query.model_fields
        )


class Endpoints:
    """The endpoints of one routes file: FastAPI's router, and what the document is made of."""

    def __init__(
        self,
        tag: str,
        errors: ErrorFormat = ErrorFormat.OPENAI,
        stream_type: str = "text/event-stream",
    ) -> None:
        """tag: their heading in /docs; stream_type: the media type of their streams"""
        self.tag = tag
        self.errors = errors
        self.stream_type = stream_type
        self.router = APIRouter()
        self.documented: list[Endpoint] = []

    def get(
        self, path: str, *, head: bool = False, **declared: Unpack[Declaration]
    ) -> Callable[[Handler], Handler]:
        """head: also answer HEAD, as load balancers and clients ask before anything else.

        A HEAD has the status and headers of its GET, and costs as much: the connection leaves the
        body out.
        """
        return self._declare("get", [path], declared, ["GET", "HEAD"] if head else ["GET"])

    def post(
        self, path: str, *, aliases: Sequence[str] = (), **declared: Unpack[Declaration]
    ) -> Callable[[Handler], Handler]:
        """aliases: paths outside of the document that are answered alike."""
        return self._declare("post", [path, *aliases], declared, ["POST"])

    def delete(self, path: str, **declared: Unpack[Declaration]) -> Callable[[Handler], Handler]:
        return self._declare("delete", [path], declared, ["DELETE"])

    def undocumented(self, path: str) -> Callable[[Handler], Handler]:
        """GET and HEAD of what is no part of the API, such as /docs itself."""
        return self._declare("get", [path], None, ["GET", "HEAD"])

    def _declare(
        self, method: Method, paths: list[str], declared: Declaration | None, methods: list[str]
    ) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            if declared is not None:
                path = CONVERTOR.sub("", paths[0])
                self.documented.append(Endpoint(method, path, handler, declared))
            for path in paths:
                self.router.add_api_route(
                    path, handler, methods=methods, response_model=None, include_in_schema=False
                )
            return handler

        return register
