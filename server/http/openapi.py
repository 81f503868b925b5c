"""The OpenAPI document: what FastAPI makes of the routes, with what it cannot know about them.

Routes read their own bodies and write their own answers.  So the document says here what and which
errors they answer with, and what a stream is made of.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.apis.error_format import is_anthropic, is_ollama
from server.http.openapi_answers import ANSWERS
from server.http.openapi_examples import example_of
from server.http.openapi_streams import STREAMS
from server.http.validation import fields_of

METHODS = ("get", "post", "delete")
TEXT = {"type": "string"}
OTHER_TYPES = {
    "/": ["text/plain"],
    "/metrics": ["text/plain"],
    "/v1/files/{file_id}/content": ["application/octet-stream"],
}


TAGS = (  # by the beginning of a path
    ("/v1/chat", "chat and text"),
    ("/v1/completions", "chat and text"),
    ("/v1/responses", "responses"),
    ("/v1/messages", "Anthropic's API"),
    ("/api", "Ollama's API"),
    ("/v1/embeddings", "vectors"),
    ("/v1/score", "vectors"),
    ("/v1/rerank", "vectors"),
    ("/v1/files", "files and batches"),
    ("/v1/batches", "files and batches"),
    ("/", "models, tokens, requests"),
)


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


ERRORS = {
    "Error": _object(
        error=_object(message=TEXT, type=TEXT, param=_or_null("string"), code=_or_null("string"))
    ),
    "AnthropicError": _object(
        type={"const": "error"},
        error=_object(type=TEXT, message=TEXT),
        request_id=_or_null("string"),
    ),
    "OllamaError": _object(error=TEXT),
}


class DocumentedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document; made when it is first asked for."""
        if self.openapi_schema is None:
            self.openapi_schema = _document(self)
        return self.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    whole = get_openapi(title=app.title, version=app.version, routes=app.routes)
    model = app.state.wavefill.config.served_names[0]
    for path, item in whole["paths"].items():
        for method in METHODS:
            if method in item:
                _complete(path, method, item[method])
                _offer(path, item[method], model)
    whole["components"] = {"schemas": ERRORS}
    return whole


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which no route gives
    name = "Error"
    if is_anthropic(path):
        name = "AnthropicError"
    elif is_ollama(path):
        name = "OllamaError"
    schema = {"$ref": f"#/components/schemas/{name}"}
    content = {"application/json": {"schema": schema}}
    responses["4XX"] = {"description": "The request is refused", "content": content}
    responses["5XX"] = {"description": "The server cannot answer", "content": content}
    responses["200"]["content"] = _answers(path, method, operation)


def _offer(path: str, operation: dict[str, Any], model: str) -> None:
    """What /docs shows: under which heading, and with which body to begin with."""
    operation.setdefault("tags", [next(tag for start, tag in TAGS if path.startswith(start))])
    content = fields_of(fields_of(operation.get("requestBody")).get("content"))
    if "application/json" in content:
        content["application/json"]["example"] = example_of(path, model)


def _answers(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    if path in OTHER_TYPES:
        return {kind: {"schema": TEXT} for kind in OTHER_TYPES[path]}
    answers: dict[str, Any] = {"application/json": {"schema": ANSWERS[method, path]}}
    if _streams(operation):
        kind = "application/x-ndjson" if is_ollama(path) else "text/event-stream"
        answers[kind] = {"itemSchema": STREAMS[method, path]}
    return answers


def _streams(operation: dict[str, Any]) -> bool:
    """Whether a field of the body or a parameter of the query asks for a stream."""
    names = [parameter["name"] for parameter in operation.get("parameters", ())]
    content = fields_of(fields_of(operation.get("requestBody")).get("content"))
    schema = fields_of(fields_of(content.get("application/json")).get("schema"))
    return "stream" in names or "stream" in fields_of(schema.get("properties"))
