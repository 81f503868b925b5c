"""The text of a query -> a pydantic model, or a RequestError that names the parameter.

Every route of the API that takes no body reads its query with this, so that a parameter which it
does not know is an error: a misspelt one would change the answer unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from starlette.datastructures import QueryParams

from server.errors import FieldPath, RequestError
from server.http.validation import Body, fields_of, items_of, parse

Q = TypeVar("Q", bound=Body)
METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)  # as clients write an object in a query
NUMBER = re.compile(r"-?[0-9]{1,18}")
WORDS: Mapping[str, bool] = {"true": True, "false": False}
MAX_SHOWN = 60  # characters of a value in a message
# What Azure's, Anthropic's and Codex's clients add to any route: it describes the caller.
CALLERS = frozenset({"api-version", "beta", "client_version"})


class NoQuery(Body):
    """No parameters at all."""


def parse_query(model: type[Q], query: QueryParams) -> Q:
    """Raises RequestError that names the parameter, what it takes and what to do."""
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(query.keys()):
        if name in CALLERS:
            continue
        values = query.getlist(name)
        plain = name.removesuffix("[]")
        entry = METADATA.fullmatch(name) if "metadata" in model.model_fields else None
        if plain == "include":
            fields.setdefault("include", []).extend(values)
        elif len(values) > 1:
            raise RequestError(
                "{} is given {} times: send it once", (FieldPath(name[:64]), len(values))
            )
        elif entry is not None:
            if not entry[1] or "][" in entry[1]:  # a list, or an object in the object
                raise RequestError(
                    "`{}` is no entry of metadata, which are texts by name: send "
                    "`metadata[key]=value`",
                    name[:64],
                    param=FieldPath("metadata"),
                    code="invalid_type",
                )
            fields.setdefault("metadata", {})[entry[1]] = values[0]
        else:
            fields[name] = _value(name, values[0], _described(model).get(name, {}))
    return parse(model, fields)


@cache
def _described(model: type[Body]) -> dict[str, dict[str, Any]]:
    """Each field's JSON Schema, without the null that stands for the default."""
    properties: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
    described: dict[str, dict[str, Any]] = {}
    for name, schema in properties.items():
        kinds = [fields_of(kind) for kind in items_of(schema.get("anyOf"))] or [schema]
        [typed] = [kind for kind in kinds if kind.get("type") != "null"]
        described[name] = typed | {"default": schema.get("default")}
    return described


def _value(name: str, text: str, schema: Mapping[str, Any]) -> object:
    """What `text` stands for in a parameter of this schema.  Raises RequestError."""
    match schema.get("type"):
        case "integer":
            lowest = schema["minimum"]
            highest = schema.get("maximum", schema.get("exclusiveMaximum", 0) - 1)
            expected = f"an integer from {lowest} to {highest}"
            if NUMBER.fullmatch(text) is None:
                raise _wrong(name, text, expected, schema)
            if not lowest <= int(text) <= highest:
                raise _wrong(name, text, expected, schema, code="invalid_value")
            return int(text)
        case "boolean":
            if text.lower() not in WORDS:
                raise _wrong(name, text, "true or false", schema)
            return WORDS[text.lower()]
        case "object":
            raise RequestError(
                "{} is an object: send each of its entries as `{}[key]=value`",
                (FieldPath(name), name),
                code="invalid_type",
            )
        case _:
            return text


def _wrong(
    name: str, text: str, expected: str, schema: Mapping[str, Any], code: str = "invalid_type"
) -> RequestError:
    value = f'"{text}"' if len(text) <= MAX_SHOWN else f"a text of {len(text)} characters"
    default = schema["default"]
    remedy = "leave it out" if default is None else f"leave it out for {default}"
    return RequestError(
        "{} is {}: it must be {}; or {}", (FieldPath(name), value, expected, remedy), code=code
    )
