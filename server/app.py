"""The FastAPI application of one API process: routes, middleware and error bodies."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from server.apis.anthropic import routes as anthropic
from server.apis.error_format import ErrorFormatMiddleware
from server.apis.ollama import embeddings as ollama_embeddings
from server.apis.ollama import routes as ollama
from server.apis.openai import chat, completions, embeddings, models, tokenize
from server.apis.ops import requests
from server.apis.ops import routes as ops
from server.apis.responses import routes as responses
from server.apis.responses.background import BackgroundResponses
from server.batches import routes as batches
from server.batches.background import in_background
from server.errors import INVALID_REQUEST, RateLimited, RequestError, error_body, internal_error
from server.http import middleware
from server.http.json_body import JsonBody
from server.http.openapi import DocumentedApp
from server.http.paths import RootPathMiddleware
from server.http.request_context import note_error
from server.http.sse import ClientGone
from server.pages import routes as pages
from server.state import ServerState, state_of
from server.telemetry.requests import CLIENT_CLOSED_REQUEST

# Routes of OpenAI's that there are not here, and what does their work.
LACKING = {
    "/v1/responses/compact": "shorten `input`, or send it with `truncation` auto to /v1/responses",
    "/v1/conversations": "use `previous_response_id` of /v1/responses",
}
HTTP_ERRORS = {404: "not_found", 405: "method_not_allowed"}
ROUTES = (
    chat,
    responses,
    anthropic,
    ollama,
    ollama_embeddings,
    completions,
    embeddings,
    models,
    tokenize,
    requests,
    batches,
    ops,
    pages,
)


def create_app(state: ServerState) -> FastAPI:
    """An application that serves `state`; the caller starts and closes what `state` holds."""
    app = _bare_app(state)
    middleware.install(app, state)
    app.add_middleware(ErrorFormatMiddleware)
    if state.config.root_path:
        app.add_middleware(RootPathMiddleware, root_path=state.config.root_path)
    return app


def line_app(state: ServerState) -> FastAPI:
    """An application for the lines of batches, which have no connection to guard."""
    return _bare_app(in_background(state))


def _bare_app(state: ServerState) -> FastAPI:
    config = state.config
    app = DocumentedApp(
        [module.endpoints for module in ROUTES],
        config.served_names[0],
        keys=bool(config.api_keys),
        root_path=config.root_path,
    )
    app.state.wavefill = state
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
    app.state.background = BackgroundResponses(state.responses)
    return app


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if isinstance(error, RateLimited):
        state_of(request).metrics.rejected(error.reason)
    note_error(error.code)
    return JsonBody(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method, message = request.url.path, request.method, str(error.detail)
    status, headers = error.status_code, dict(error.headers or {})
    if path in LACKING:  # also where it looks like the id of a response
        status, headers = 404, {}
    if status == 404:
        message = f"there is no route {method} {path[:100]}: {_remedy(path)}"
    if status == 405:
        allowed = headers["Allow"] = ", ".join(_methods(path))
        message = f"{path[:100]} does not answer to {method}, but to {allowed}: see /docs"
    code = HTTP_ERRORS.get(status, "http_error")
    note_error(code)
    return JsonBody(error_body(message, INVALID_REQUEST, None, code), status, headers)


def _remedy(path: str) -> str:
    """For a path without a route: base URLs often lack the /v1, or have it twice."""
    if path in LACKING:
        return LACKING[path]
    for near in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        if near not in (path, "/") and _methods(near):
            return f"do you mean {near[:100]}?"
    return "see /docs for those there are"


def _methods(path: str) -> list[str]:
    """The methods of all routes of this path; the framework names those of the first."""
    found: set[str] = set()
    for module in ROUTES:
        for route in module.endpoints.router.routes:
            if isinstance(route, Route) and route.path_regex.match(path):
                found |= route.methods or set()
    return sorted(found)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    # Only for lines of batches: middleware.Bounds answers requests from a connection.
    return JsonBody(internal_error(), 500)
