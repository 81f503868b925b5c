"""JSON Schemas of callers: limits, and keywords that cannot be honoured, named by their path.

What passes here is compiled by the grammar library, which has the last word.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import orjson

from server.apis.openai.response_format_schema import MAX_REGEX, MAX_SCHEMA
from server.constrained.grammar_text import GUIDANCE
from server.constrained.schema_tree import LISTS, MAPS, NESTED, Node, rebuilt, walk
from server.errors import FieldPath, RequestError
from server.http.validation import fields_of, items_of

MAX_SCHEMAS = 1 << 20  # bytes of JSON, of several schemas of one request
MAX_PROPERTIES = 5000  # OpenAI's limit
# Any of them may be next, so each costs time at every token.  The library's own limit is 498.
MAX_OPTIONAL = 480
CODE = "unsupported_schema"
MAX_VALUES = 10_000  # of all enums together

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
    nodes = list(walk(schema, param))
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
    return rebuilt(schema, lambda each: {key: each[key] for key in each if key not in REFUSED})


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
