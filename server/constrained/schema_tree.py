"""The schemas inside a JSON Schema: each with its path, a copy of all, and what a $ref names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from server.errors import FieldPath, RequestError
from server.http.validation import fields_of, items_of, kind_of

MAX_DEPTH = 40  # schemas inside schemas

NESTED = frozenset({"additionalProperties", "additionalItems", "items"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


class Node(NamedTuple):
    schema: dict[str, Any]
    path: FieldPath
    depth: int


def walk(schema: dict[str, Any], param: FieldPath) -> Iterator[Node]:
    """All schemas inside a schema, the outer ones first."""
    waiting = [Node(schema, param, 0)]
    while waiting:
        node = waiting.pop()
        yield node
        if node.depth == MAX_DEPTH:
            raise RequestError(
                "the schema is nested deeper than {} levels at {}: use $ref", (MAX_DEPTH, node.path)
            )
        waiting.extend(reversed(list(_children(node))))


def _children(node: Node) -> Iterator[Node]:
    for key, value in node.schema.items():
        path, depth = node.path / key, node.depth + 1
        if key in MAPS:
            for name, inner in fields_of(value).items():
                if kind_of(inner) == "object":
                    yield Node(fields_of(inner), path / name[:64], depth)
        elif key in NESTED and kind_of(value) == "object":
            yield Node(fields_of(value), path, depth)
        elif key in LISTS:
            for index, inner in enumerate(items_of(value)):
                if kind_of(inner) == "object":
                    yield Node(fields_of(inner), path / index, depth)


def rebuilt(
    schema: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A copy in which every schema went through `change`, the values of enums and const apart."""

    def inner(value: object) -> object:
        return rebuilt(fields_of(value), change) if kind_of(value) == "object" else value

    copy: dict[str, Any] = {}
    for key, value in change(schema).items():
        if key in MAPS and kind_of(value) == "object":
            copy[key] = {name: inner(each) for name, each in fields_of(value).items()}
        elif key in LISTS and kind_of(value) == "array":
            copy[key] = [inner(each) for each in items_of(value)]
        else:
            copy[key] = inner(value) if key in NESTED else value
    return copy


def resolved(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that its $ref names, such as #/$defs/unit."""
    fields = fields_of(schema)
    ref = fields.get("$ref")
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return fields
    found = root
    for name in ref[2:].split("/"):
        found = fields_of(found.get(name))
    return found
