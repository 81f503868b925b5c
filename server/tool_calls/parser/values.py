"""Arguments written as plain text, as JSON of the types in the tool's schema."""

from __future__ import annotations

import json
import re
from typing import Any

from server.constrained.schema_tree import resolved
from server.http.validation import fields_of, items_of
from server.tool_calls.parser.literal import as_json, quoted

Schema = dict[str, Any]

STRING = frozenset({"string"})
MAX_DEPTH = 8  # of references and unions
WHOLE = re.compile(r"(-?[0-9]+)(?:\.0+)?")
KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
KINDS[type(None)] = "null"
BY_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def argument_kinds(parameters: Schema, name: str) -> frozenset[str]:
    """The JSON types that an argument may have; none if the schema does not say."""
    schema = fields_of(parameters.get("properties")).get(name)
    return frozenset(_kinds(schema, parameters, 0))


def _kinds(schema: object, root: Schema, depth: int) -> set[str]:
    fields = fields_of(schema)
    if depth > MAX_DEPTH:
        return set()
    named = fields.get("type")
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else items_of(fields["type"])
        return {kind for kind in names if isinstance(kind, str)}
    if "const" in fields or isinstance(fields.get("enum"), list):
        options: list[object] = [fields["const"]] if "const" in fields else items_of(fields["enum"])
        return {KINDS.get(type(option), "object") for option in options}
    if isinstance(fields.get("$ref"), str):
        return _kinds(resolved(fields, root), root, depth + 1)
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in items_of(fields.get(key)):
            found |= _kinds(branch, root, depth + 1)
    return found


def as_argument(text: str, kinds: frozenset[str]) -> str:
    """JSON for the text of one argument: of one of the kinds if it can be read so."""
    if kinds == STRING:
        return quoted(text)
    word = text.strip()
    value = as_json(word.lower() if word.lower() in ("true", "false", "null") else word)
    if value is None:
        return quoted(text)
    kind = BY_FIRST.get(value[0], "number")
    if "string" in kinds and (kind == "string" or not _fits(value, kind, kinds)):
        return quoted(text)
    if kind == "number" and "integer" in kinds and "number" not in kinds:
        return WHOLE.sub(r"\1", value)
    return value


def _fits(value: str, kind: str, kinds: frozenset[str]) -> bool:
    if kind == "number" and "integer" in kinds:
        return WHOLE.fullmatch(value) is not None or "number" in kinds
    return kind in kinds


def decoded(text: str) -> str:
    """The text that a JSON string stands for; half a surrogate pair becomes a question mark."""
    return json.loads(text).encode("utf-8", "replace").decode()
