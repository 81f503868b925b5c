"""Query strings of the routes under /v1/responses/{id}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.datastructures import QueryParams

from server.errors import RequestError, UnsupportedParameter
from server.schema.base import Body, parse
from server.schema.response_items import ItemId
from server.schema.responses import Include

Q = TypeVar("Q", bound=Body)
METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)  # as clients write an object in a query
WORDS: Mapping[str, bool] = {"true": True, "false": False}


class RetrieveQuery(Body):
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    include_obfuscation: bool | None = None
    starting_after: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        if self.include_obfuscation:
            raise UnsupportedParameter(
                "`include_obfuscation` is not supported by this server: use false",
                param="include_obfuscation",
            )
        if self.starting_after is not None and not self.stream:
            raise RequestError(
                "`starting_after` is only allowed when `stream` is true: set it or leave "
                "`starting_after` out",
                param="starting_after",
            )


class ItemsQuery(Body):
    after: ItemId | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class NoQuery(Body):
    """No parameters at all."""


def parse_query(model: type[Q], query: QueryParams) -> Q:
    """Raises RequestError that names the parameter."""
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(query.keys()):
        values = query.getlist(name)
        plain = name.removesuffix("[]")
        entry = METADATA.fullmatch(name)
        if plain == "include":
            fields.setdefault("include", []).extend(values)
        elif len(values) > 1:
            raise RequestError(
                f"`{name[:64]}` is given {len(values)} times: send it once", param=name[:64]
            )
        elif entry is not None:
            fields.setdefault("metadata", {})[entry[1]] = values[0]
        else:
            fields[name] = _value(values[0])
    return parse(model, fields)


def openapi_query(model: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its own query."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return {"parameters": [_described(name, schema) for name, schema in properties.items()]}


def _described(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "in": "query", "required": False, "schema": schema}
    return told | {"style": "deepObject", "explode": True} if name == "metadata" else told


def _value(text: str) -> object:
    """Numbers and booleans as JSON has them; what is neither stays a string."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(text) < 20 else text
