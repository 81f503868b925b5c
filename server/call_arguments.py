"""Grammars of calls whose arguments stand one by one between marks, not in one JSON object."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.grammar_marks import GrammarMarks, escaped
from server.parsing.values import argument_kinds
from server.schema.base import fields_of, items_of

Schema = dict[str, Any]
WHOLE = re.compile(r"\^(\(\?:.*\))\$", re.DOTALL)  # a pattern of a whole text


@dataclass(frozen=True)
class ArgumentForm:
    """What stands around an argument; KEY is its name."""

    text: str  # before a value that is text
    json: str  # before any other
    json_end: str  # behind any other, before `close`
    close: str


@dataclass
class Parts:
    """What the grammar of one call is made of beside the call's own rule."""

    rules: list[str] = field(default_factory=list[str])
    grammars: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    schemas: dict[str, Schema] = field(default_factory=dict[str, Schema])  # by path
    repeated: int = 0  # bytes of definitions in these grammars


@dataclass(frozen=True)
class Definitions:
    """What a schema's properties may refer to; each that does gets a copy."""

    schemas: Schema
    size: int  # bytes

    @classmethod
    def of(cls, schema: Schema) -> Definitions:
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        return cls(shared, len(orjson.dumps(shared)))

    def add(self, parts: Parts, rule: str, value: Schema, path: str, whitespace: str) -> None:
        """Add a grammar of this name for the JSON of `value`, at `path` of the request."""
        refers = bool(self.schemas) and b'"$ref"' in orjson.dumps(value)
        shared = self.schemas if refers else {}
        parts.repeated += self.size if refers else 0
        whole = {**shared, **value, "x-guidance": {"whitespace_pattern": whitespace}}
        parts.grammars.append({"name": rule, "json_schema": whole})
        parts.schemas[path] = whole


def arguments(
    name: str, schema: Schema, path: str, form: ArgumentForm, marks: GrammarMarks, whitespace: str
) -> tuple[str, Parts]:
    """All arguments of a call, in the order of the schema: an expression, and the rules for it.

    name   what the rules' names begin with
    schema of check_schema, at `path` of the request
    Of text an enum is kept to, and a pattern that is written ^(?:...)$; its length is not.
    """
    parts = Parts()
    required = items_of(schema.get("required"))
    definitions = Definitions.of(schema)
    sequence: list[str] = []
    for place, (key, value) in enumerate(fields_of(schema.get("properties")).items()):
        rule = f"{name}_{place}"
        kinds = argument_kinds(schema, key)
        if kinds and "string" not in kinds:
            definitions.add(parts, rule, fields_of(value), f"{path}.properties.{key}", whitespace)
            begin = marks.of(form.json.replace("KEY", key))
            parts.rules.append(f"{rule}_a: {begin} @{rule} {marks.of(form.json_end + form.close)}")
        else:
            parts.rules += _text(rule, key, fields_of(value), form, marks)
        sequence.append(f"{rule}_a" if key in required else f"{rule}_a?")
    return " ".join(sequence), parts


def _text(
    rule: str, key: str, schema: Schema, form: ArgumentForm, marks: GrammarMarks
) -> list[str]:
    begin = marks.of(form.text.replace("KEY", key))
    words = items_of(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    if words and all(isinstance(word, str) and word for word in words):
        choice = " | ".join(marks.of(word + form.json_end) for word in words)
        return [f"{rule}_a: {begin} ({choice}) {marks.of(form.close)}"]
    pattern = WHOLE.fullmatch(str(schema.get("pattern", "")))
    if pattern is not None:  # the first text that has the pattern and is followed by the end
        whole = escaped(f"(?:{pattern[1]})")
        text = marks.after(f"{rule}_t", whole, form.json_end + form.close)
        return [f"{rule}_a: {begin} {rule}_t", text]
    return [f"{rule}_a: {begin} {rule}_t", marks.after_any(f"{rule}_t", form.close)]
