"""Grammars of calls that are written as Python: f(city="Rome", days=2)."""

from __future__ import annotations

from typing import Any

from server.call_arguments import Definitions, Parts, Schema
from server.errors import UnsupportedParameter
from server.grammar_marks import literal
from server.schema.base import fields_of, items_of, kind_of

COMMA = "/,[ \\n]?/"
# Any arguments, as the reader of calls takes them.
FREE_RULES = (
    r"python_free: (python_pair (python_comma python_pair)*)?",
    r"python_comma: /\s{0,32},\s{0,32}/",
    r"python_pair: /\w{1,256}\s{0,8}=\s{0,8}/ python_value",
    r"python_value: /[A-Za-z0-9_.+\-]+/ | python_string | python_list | python_tuple | python_dict",
    r"""python_string: /"(\\(?s:.)|[^"\\])*"/ | /'(\\(?s:.)|[^'\\])*'/""",
    r"python_values: (python_value (python_comma python_value)*)?",
    r"python_list: /\[\s{0,32}/ python_values /\s{0,32},?\s{0,32}\]/",
    r"python_tuple: /\(\s{0,32}/ python_values /\s{0,32},?\s{0,32}\)/",
    r"python_entry: python_value /\s{0,8}:\s{0,8}/ python_value",
    r"python_entries: (python_entry (python_comma python_entry)*)?",
    r"python_dict: /\{\s{0,32}/ python_entries /\s{0,32},?\s{0,32}\}/",
)


def python_arguments(name: str, schema: Schema, path: str, whitespace: str) -> tuple[str, Parts]:
    """All arguments of a call, in the order of the schema: an expression, and the rules for it.

    name   what the rules' names begin with
    schema of check_schema, at `path` of the request
    Values are JSON, but that true, false and null may be spelt as Python does.
    Raises UnsupportedParameter for an argument whose name Python would not read.
    """
    parts = Parts()
    required = items_of(schema.get("required"))
    definitions = Definitions.of(schema)
    properties = fields_of(schema.get("properties"))
    for place, (key, value) in enumerate(properties.items()):
        if not key.isidentifier():
            raise UnsupportedParameter(
                f"`{path}.properties` has {key[:64]!r}: this model writes calls as Python, where "
                "an argument's name has letters, digits and _ only; rename it",
                param=f"{path}.properties",
            )
        rule = f"{name}_{place}"
        definitions.add(parts, rule, fields_of(value), f"{path}.properties.{key}", whitespace)
        spellings = " | ".join([f"@{rule}", *(f"/{word}/" for word in _words(value))])
        parts.rules.append(f"{rule}_a: /{literal(key)}=/ ({spellings})")
        # What may follow where nothing stands before it, and where something does.
        here, after = f"{rule}_a {name}_{place + 1}_more", f"{COMMA} {rule}_a"
        if key in required:
            parts.rules.append(f"{rule}_first: {here}")
        else:
            parts.rules.append(f"{rule}_first: {here} | {name}_{place + 1}_first")
            after = f"({after})?"
        parts.rules.append(f"{rule}_more: {after} {name}_{place + 1}_more")
    last = f"{name}_{len(properties)}"
    parts.rules += [f'{last}_first: ""', f'{last}_more: ""']
    return f"{name}_0_first", parts


def _words(schema: object) -> set[str]:
    """How Python spells those values of a schema that JSON spells otherwise; {} if in doubt."""
    fields = fields_of(schema)
    if "allOf" in fields:
        return set()
    if "const" in fields or "enum" in fields:
        values: list[Any] = items_of(fields.get("enum")) or [fields.get("const")]
        return {repr(value) for value in values if value is None or isinstance(value, bool)}
    named = fields.get("type")
    types = [named] if kind_of(named) == "string" else items_of(named)
    found: set[str] = set()
    if "boolean" in types:
        found |= {"True", "False"}
    if "null" in types:
        found.add("None")
    if not types:
        for key in ("anyOf", "oneOf"):
            for branch in items_of(fields.get(key)):
                found |= _words(branch)
    return found
