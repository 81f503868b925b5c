"""JSON Schemas of callers: limits, and keywords that cannot be honoured, named by their path.

What passes here is compiled by the grammar library, which has the last word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

from server.apis.openai.response_format_schema import MAX_REGEX, MAX_SCHEMA
from server.constrained.grammar_text import GUIDANCE
from server.errors import FieldPath, RequestError
from server.http.validation import fields_of, items_of, kind_of

MAX_SCHEMAS = 1 << 20  # bytes of JSON, of several schemas of one request
MAX_DEPTH = 40  # schemas inside schemas
MAX_PROPERTIES = 5000  # OpenAI's limit
# Any of them may be next, so each costs time at every token.  The library's own limit is 498.
MAX_OPTIONAL = 480
CODE = "unsupported_schema"
MAX_VALUES = 10_000  # of all enums together

NESTED = frozenset({"additionalProperties", "additionalItems", "items"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
OTHERS = (
    *("type", "enum", "const", "required", "$ref", "format", "pattern"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    # These say nothing about what is valid.
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
    *("writeOnly", "$schema", "$id", "id", "$comment", "$anchor", "$vocabulary"),
    *("contentEncoding", "contentMediaType", "discriminator", "externalDocs", "xml"),
)
# Keyword -> what to do instead; values that have no effect.
REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "not": ("say what is allowed instead", ()),
    "if": ("use anyOf with one schema a case", ()),
    "then": ("use anyOf with one schema a case", ()),
    "else": ("use anyOf with one schema a case", ()),
    "uniqueItems": ("check the answer yourself", (False,)),
    "contains": ("use prefixItems or items", ()),
    "minContains": ("use minItems", ()),
    "maxContains": ("use maxItems", ()),
    "propertyNames": ("use patternProperties with additionalProperties false", ()),
    "dependentRequired": ("use anyOf with one schema a case", ({},)),
    "dependentSchemas": ("use anyOf with one schema a case", ({},)),
    "dependencies": ("use anyOf with one schema a case", ({},)),
    "unevaluatedProperties": ("use additionalProperties", (True,)),
    "unevaluatedItems": ("use items", (True,)),
    "$dynamicRef": ("use $ref", ()),
    "$recursiveRef": ("use $ref", ()),
    "contentSchema": ("describe the string by a pattern", ()),
    "nullable": ('use "type": [..., "null"]', (False,)),
    GUIDANCE: ("use the options of `structured_outputs`", ()),
}
BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]")  # look-around and back-references
KNOWN = sorted({*NESTED, *LISTS, *MAPS, *OTHERS, *REFUSED})


def check_total(schemas: Iterable[object], param: FieldPath) -> None:
    """Raises RequestError if the schemas in the field `param` are too large together."""
    size = 0
    for schema in schemas:
        size += len(orjson.dumps(schema))
        if size > MAX_SCHEMAS:
            raise RequestError(
                "the schemas in {} have more than {} bytes in all: send fewer or smaller ones",
                (param, MAX_SCHEMAS),
                code=CODE,
            )


class Node(NamedTuple):
    schema: dict[str, Any]
    path: FieldPath
    depth: int


def check_schema(
    schema: dict[str, Any], param: FieldPath, *, strict: bool | None = None
) -> dict[str, Any]:
    """The schema without keywords that have no effect.

    strict  of the request, if it may be left out: False leaves out what cannot be enforced
    Raises RequestError that names the path of what cannot be honoured, `param` in front.
    """
    size = len(orjson.dumps(schema))
    if size > MAX_SCHEMA:
        raise RequestError(
            "the schema in {} has {} bytes: at most {} are taken", (param, size, MAX_SCHEMA)
        )
    properties = values = 0
    nodes = list(_walk(schema, param))
    for node in nodes:
        _check_keywords(node, strict)
        properties += len(fields_of(node.schema.get("properties")))
        values += len(items_of(node.schema.get("enum")))
        if properties > MAX_PROPERTIES or values > MAX_VALUES:
            raise RequestError(
                "the schema in {} is too large at {}: at most {} properties and {} enum "
                "values are taken",
                (param, node.path, MAX_PROPERTIES, MAX_VALUES),
                param=node.path,
            )
    _check_optional(nodes)
    return _rebuilt(schema, lambda each: {key: each[key] for key in each if key not in REFUSED})


def _walk(schema: dict[str, Any], param: FieldPath) -> Iterator[Node]:
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


def _check_keywords(node: Node, strict: bool | None) -> None:
    for key, value in node.schema.items():
        path = node.path / key[:64]
        if key in REFUSED:
            remedy, idle = REFUSED[key]
            has_effect = not any(value == each and type(value) is type(each) for each in idle)
            if has_effect and strict is not False:
                remedy += ", or leave `strict` out" if strict else ""
                raise RequestError(
                    "the keyword `{}` at {} cannot be enforced: {}", (key, path, remedy), code=CODE
                )
        elif close := _misspelt(key):
            raise RequestError(
                "{} is not a keyword of JSON Schema: did you mean `{}`?", (path, close), code=CODE
            )
        elif key == "pattern" and len(str(value)) > MAX_REGEX:
            raise RequestError(
                "{} has {} characters: at most {} are taken", (path, len(str(value)), MAX_REGEX)
            )


def _check_optional(nodes: list[Node]) -> None:
    """Properties come in order, so the longest run of optional ones counts."""
    anywhere = set[str]().union(*map(_required, nodes))
    for node in nodes:
        # An allOf is one schema: one of its branches may require what another describes.
        joined = "allOf" in node.schema or any(
            step == "allOf" and isinstance(after, int) for step, after in pairwise(node.path)
        )
        required = anywhere if joined else _required(node)
        optional = longest = 0
        for name in fields_of(node.schema.get("properties")):
            optional = 0 if name in required else optional + 1
            longest = max(longest, optional)
        if longest > MAX_OPTIONAL:
            raise RequestError(
                "{} has {} optional properties one after the other: at most {} are taken; make "
                "more of them required",
                (node.path, longest, MAX_OPTIONAL),
                code=CODE,
            )


def _required(node: Node) -> set[str]:
    return {name for name in items_of(node.schema.get("required")) if isinstance(name, str)}


def _misspelt(key: str) -> str | None:
    """The keyword that an unknown one nearly is.  Others are annotations, as JSON Schema has it."""
    if key in KNOWN or key.startswith("x-") or len(key) < 4:
        return None
    plain = key.replace("_", "").replace("-", "").lower()
    same = next((known for known in KNOWN if known.lower() == plain), None)
    # A schema may have 100,000 names of its own: only a part of KNOWN is compared with each.
    similar = [each for each in KNOWN if each[0] == key[0] or each[-1] == key[-1]]
    close = difflib.get_close_matches(key[:64], similar, n=1, cutoff=0.88)
    return same or (close[0] if close else None)


def _rebuilt(
    schema: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A copy in which every schema went through `change`, the values of enums and const apart."""

    def inner(value: object) -> object:
        return _rebuilt(fields_of(value), change) if kind_of(value) == "object" else value

    copy: dict[str, Any] = {}
    for key, value in change(schema).items():
        if key in MAPS and kind_of(value) == "object":
            copy[key] = {name: inner(each) for name, each in fields_of(value).items()}
        elif key in LISTS and kind_of(value) == "array":
            copy[key] = [inner(each) for each in items_of(value)]
        else:
            copy[key] = inner(value) if key in NESTED else value
    return copy


def forbid_additional(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy in which objects with `properties` have no others, unless they say so."""

    def closed(each: dict[str, Any]) -> dict[str, Any]:
        return {"additionalProperties": False, **each} if "properties" in each else each

    return _rebuilt(schema, closed)


def relaxed_schema(schema: dict[str, Any], param: FieldPath) -> dict[str, Any]:
    """As check_schema, for a schema without `strict`: what no grammar can express is left out.

    Clients send such schemas for the model to read, with what their validators know; an answer may
    then break a keyword that check_schema refuses, a pattern with look-around or a format.
    """

    def possible(each: dict[str, Any]) -> dict[str, Any]:
        pattern = each.get("pattern")
        if isinstance(pattern, str) and BEYOND_REGULAR.search(pattern):
            return {key: each[key] for key in each if key != "pattern"}
        return each

    checked = _rebuilt(check_schema(schema, param, strict=False), possible)
    return {**checked, GUIDANCE: {"lenient": True, "coerce_one_of": True}}


def strict_schema(schema: dict[str, Any], param: FieldPath) -> dict[str, Any]:
    """As check_schema, for `strict`: where `additionalProperties` is absent, it is false.

    Raises RequestError also where that would forbid the properties of another schema of the same
    object.
    """
    checked = check_schema(schema, param, strict=True)
    for node in _walk(checked, param):
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
