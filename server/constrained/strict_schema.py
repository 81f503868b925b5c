"""What `strict` means for a JSON Schema, and what a schema without it is taken as."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from server.constrained.grammar_text import GUIDANCE
from server.constrained.json_schema import CODE, check_schema
from server.constrained.schema_tree import rebuilt, resolved, walk
from server.errors import FieldPath, RequestError
from server.http.validation import fields_of, items_of

# Look-around, of which borders of words are one kind, and back-references.
BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bBk])")


def forbid_additional(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy in which objects with `properties` have no others, unless they say so."""

    def closed(each: dict[str, Any]) -> dict[str, Any]:
        return {"additionalProperties": False, **each} if "properties" in each else each

    return rebuilt(schema, closed)


def relaxed_schema(schema: dict[str, Any], param: FieldPath) -> dict[str, Any]:
    """As check_schema, for a schema without `strict`: what no grammar can express is left out.

    Clients send such schemas for the model to read, with what their validators know; an answer may
    then break a keyword that check_schema refuses, a pattern with look-around or a format.
    """

    def possible(each: dict[str, Any]) -> dict[str, Any]:
        pattern, named = each.get("pattern"), fields_of(each.get("patternProperties"))
        if isinstance(pattern, str) and BEYOND_REGULAR.search(pattern):
            each = {key: each[key] for key in each if key != "pattern"}
        if any(map(BEYOND_REGULAR.search, named)):
            left = {name: named[name] for name in named if not BEYOND_REGULAR.search(name)}
            each = {**each, "patternProperties": left}
        return each

    checked = rebuilt(check_schema(schema, param, strict=False), possible)
    return {**checked, GUIDANCE: {"lenient": True, "coerce_one_of": True}}


def strict_schema(schema: dict[str, Any], param: FieldPath) -> dict[str, Any]:
    """As check_schema, for `strict`: where `additionalProperties` is absent, it is false.

    Raises RequestError also where that would forbid the properties of another schema of the same
    object.
    """
    checked = check_schema(schema, param, strict=True)
    for node in walk(checked, param):
        for key, others in _combined(node.schema):
            meant = [node.schema, *(resolved(each, checked) for each in others)]
            listing = [each for each in meant if "properties" in each]
            if len(listing) > 1 and any("additionalProperties" not in each for each in listing):
                raise RequestError(
                    "{} describes one object by several schemas, and with `strict` "
                    "each of them forbids the properties of the others: write the properties into "
                    "one object, or set `additionalProperties` in each",
                    node.path / key,
                    code=CODE,
                )
    return forbid_additional(checked)


def _combined(schema: dict[str, Any]) -> Iterator[tuple[str, list[object]]]:
    """What a value must fit besides a schema's own keywords, with the keyword that requires it."""
    if "$ref" in schema:
        yield "$ref", [{"$ref": schema["$ref"]}]
    yield "allOf", items_of(schema.get("allOf"))
    for key in ("anyOf", "oneOf"):
        for case in items_of(schema.get(key)):
            yield key, [case]
