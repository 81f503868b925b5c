"""What the JSON Schemas of answers and of streams are built from."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

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


def page_schema(entry: Schema) -> Schema:
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


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def json_text(schema: Schema) -> Schema:
    """A string that holds JSON."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def events(*kinds: tuple[tuple[str, ...], Schema]) -> Schema:
    """Server-sent events that name their type twice: some types, and the fields of their JSON."""
    return any_of(
        *(
            object_of(event=word(*names), data=json_text(with_required(fields, type=word(*names))))
            for names, fields in kinds
        )
    )


ERROR = object_of(error=object_of(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT)))
