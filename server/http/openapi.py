"""The OpenAPI document, made of what the endpoints declare.

A stream's item has its schema under `itemSchema`, as in OpenAPI 3.2.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI

from server.http.endpoints import Endpoint, Endpoints, ErrorFormat
from server.http.openapi_parts import Schema
from server.http.paths import needs_no_key
from server.http.validation import Body, fields_of, items_of, kind_of

JSON = "application/json"
BEARER = "API key"  # the scheme's name, which /docs shows behind Authorize


class DocumentedApp(FastAPI):
    """Routes to `groups`; /openapi.json says what they declare."""

    def __init__(
        self, groups: Sequence[Endpoints], model: str, *, keys: bool = False, root_path: str = ""
    ) -> None:
        """model: the name that the example bodies ask for; keys: whether requests need one"""
        super().__init__(
            title="Wavefill",
            docs_url=None,
            redoc_url=None,
            openapi_url="/openapi.json",
            redirect_slashes=False,  # it would send callers to whatever host their header names
        )
        self._groups = groups
        self._model = model
        self._keys = keys
        self._prefix = root_path
        for group in groups:
            self.include_router(group.router)

    def openapi(self) -> dict[str, Any]:
        """The document; made at the first request for it."""
        if self.openapi_schema is None:
            self.openapi_schema = self._document()
        return self.openapi_schema

    def _document(self) -> dict[str, Any]:
        paths: dict[str, dict[str, Any]] = {}
        for group in self._groups:
            for endpoint in group.documented:
                methods = paths.setdefault(endpoint.path, {})
                assert endpoint.method not in methods, f"two of {endpoint.method} {endpoint.path}"
                methods[endpoint.method] = operation = _operation(group, endpoint, self._model)
                if self._keys and needs_no_key(endpoint.path):
                    operation["security"] = []
        components: dict[str, Any] = {"schemas": dict(each.value for each in ErrorFormat)}
        document: dict[str, Any] = {
            "openapi": self.openapi_version,
            "info": {"title": self.title, "version": self.version},
            "paths": paths,
            "components": components,
        }
        if self._keys:
            components["securitySchemes"] = {BEARER: {"type": "http", "scheme": "bearer"}}
            document["security"] = [{BEARER: []}]
        if self._prefix:
            document["servers"] = [{"url": self._prefix}]
        return document


def _operation(group: Endpoints, endpoint: Endpoint, model: str) -> dict[str, Any]:
    declared, name = endpoint.declared, endpoint.handler.__name__
    operation: dict[str, Any] = {
        "tags": [group.tag],
        "summary": declared["summary"],
        "operationId": re.sub(r"\W", "_", f"{name}{endpoint.path}") + f"_{endpoint.method}",
        "responses": _responses(group, declared.get("stream"), endpoint),
    }
    description = inspect.getdoc(endpoint.handler)
    if description:
        operation["description"] = description
    parameters = [
        _parameter(name, "path", {"type": "string", "title": name.replace("_", " ").title()})
        for name in endpoint.path_parameters()
    ]
    if "query" in declared:
        properties: dict[str, Schema] = body_schema(declared["query"])["properties"]
        parameters += [_parameter(name, "query", schema) for name, schema in properties.items()]
    if parameters:
        operation["parameters"] = parameters
    content: dict[str, Any] = {}
    if "form" in declared:
        content["multipart/form-data"] = {"schema": declared["form"]}
    if "body" in declared:
        body = declared["body"]
        named = {"model": model} if "model" in body.model_fields else {}
        content[JSON] = {
            "schema": body_schema(body, declared.get("body_fields", ())),
            "example": named | dict(declared.get("example", {})),
        }
    if content:
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(group: Endpoints, stream: Schema | None, endpoint: Endpoint) -> dict[str, Any]:
    declared = endpoint.declared
    answers: dict[str, Any] = {declared.get("media_type", JSON): {"schema": declared["answer"]}}
    if stream is not None:
        answers[group.stream_type] = {"itemSchema": stream}
    error = {JSON: {"schema": {"$ref": f"#/components/schemas/{group.errors.value[0]}"}}}
    return {
        "200": {"description": "Successful Response", "content": answers},
        "4XX": {"description": "The request is refused", "content": error},
        "5XX": {"description": "The server cannot answer", "content": error},
    }


def _parameter(name: str, where: str, schema: Schema) -> dict[str, Any]:
    parameter = {"name": name, "in": where, "required": where == "path", "schema": schema}
    # OpenAPI's name for metadata[key]=value.
    return parameter | {"style": "deepObject", "explode": True} if name == "metadata" else parameter


def body_schema(model: type[Body], only: Collection[str] = ()) -> Schema:
    """The JSON Schema of a body, with all references resolved; `only`: the fields it keeps."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    if only:
        fields = {name: field for name, field in schema["properties"].items() if name in only}
        schema |= {"properties": fields}

    def resolved(node: object) -> object:
        if kind_of(node) == "array":
            return [resolved(item) for item in items_of(node)]
        fields = fields_of(node)
        if "$ref" in fields:
            return resolved(definitions[fields["$ref"].rsplit("/", 1)[-1]])
        # The `default: null` of each optional field would be a third of the document.
        kept = {key: resolved(item) for key, item in fields.items() if item is not None}
        return kept if fields else node

    return fields_of(resolved(schema))
