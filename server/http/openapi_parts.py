"""What the schemas of answers are built from."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
Answers = dict[tuple[str, str], Schema]  # by method and path

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def object_of(**fields: Schema) -> Schema:
    """All fields are required."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def with_optional(schema: Schema, **fields: Schema) -> Schema:
    return {**schema, "properties": schema["properties"] | fields}


def with_required(schema: Schema, **fields: Schema) -> Schema:
    return {**with_optional(schema, **fields), "required": [*schema["required"], *fields]}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def word(*values: str) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def page_of(entry: Schema) -> Schema:
    """OpenAI's list that is read in pages."""
    return object_of(
        object=word("list"),
        data=list_of(entry),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )


def deleted(kind: str) -> Schema:
    return object_of(id=TEXT, object=word(kind), deleted={"const": True})
