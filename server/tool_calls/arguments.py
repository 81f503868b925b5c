"""Grammars of calls whose arguments stand one by one between delimiters, not in one JSON object."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.constrained.grammar_text import (
    GUIDANCE,
    Grammar,
    GrammarLiterals,
    Path,
    escaped,
    literal,
    with_whitespace,
)
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.http.validation import fields_of, items_of, kind_of
from server.tool_calls.format_types import ArgumentForm, CallForm
from server.tool_calls.parser.values import argument_kinds

Schema = dict[str, Any]
MAX_REPEATED = 4 << 20  # bytes of definitions, where each argument has a grammar of its own
WHOLE = re.compile(r"\^(\(\?:.*\))\$", re.DOTALL)  # a pattern of a whole text


@dataclass
class CallRules:
    """What a grammar of calls consists of."""

    form: CallForm
    literals: GrammarLiterals
    rules: list[str] = field(default_factory=list[str])
    grammars: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    schemas: list[tuple[Path, Schema]] = field(default_factory=list[tuple[Path, Schema]])
    repeated: int = 0  # bytes of definitions in these grammars

    def add_json(self, rule: str, schema: Schema, key: str, path: FieldPath) -> None:
        """Add a grammar of this name for the JSON of one argument of `schema`, which is at `path`.

        An argument that refers to definitions gets a copy of them.
        """
        value = fields_of(fields_of(schema["properties"])[key])
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        if shared and b'"$ref"' in orjson.dumps(value):
            self.repeated += len(orjson.dumps(shared))
        else:
            shared = {}
        shared[GUIDANCE] = schema.get(GUIDANCE, {})
        if self.repeated > MAX_REPEATED:
            raise RequestError(
                "the definitions of {} are repeated for each argument that refers to them, which "
                "makes more than {} bytes: write small ones in place of $ref",
                (path, MAX_REPEATED),
            )
        self.add_schema(rule, with_whitespace({**shared, **value}), path / "properties" / key)

    def add_schema(self, rule: str, schema: Schema, path: FieldPath) -> None:
        self.grammars.append({"name": rule, "json_schema": schema})
        self.schemas.append((path, schema))

    def grammar(self, *rules: str) -> Grammar:
        """The grammar that begins with these rules."""
        lark = "\n".join([*rules, *self.rules])
        return Grammar([{"lark_grammar": lark}, *self.grammars], self.schemas, ("tools",))


def arguments(
    calls: CallRules, name: str, schema: Schema, path: FieldPath, form: ArgumentForm
) -> str:
    """An expression for all arguments of a call, in the order of the schema; its rules are added.

    name   what the rules' names begin with
    schema of check_schema, at `path` of the request
    A text must be one of its enum, or have its pattern if that is written ^(?:...)$; its length is
    free.
    """
    literals = calls.literals
    required = items_of(schema.get("required"))
    sequence: list[str] = []
    for place, (key, value) in enumerate(fields_of(schema.get("properties")).items()):
        rule = f"{name}_{place}"
        kinds = argument_kinds(schema, key)
        if kinds and "string" not in kinds:
            calls.add_json(rule, schema, key, path)
            begin = literals.of(form.json.replace("KEY", key))
            end = literals.of(form.json_end + form.close)
            calls.rules.append(f"{rule}_a: {begin} @{rule} {end}")
        else:
            calls.rules += _text(rule, key, fields_of(value), form, literals)
        sequence.append(f"{rule}_a" if key in required else f"{rule}_a?")
    return " ".join(sequence)


def _text(
    rule: str, key: str, schema: Schema, form: ArgumentForm, literals: GrammarLiterals
) -> list[str]:
    begin = literals.of(form.text.replace("KEY", key))
    words = items_of(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    if words and all(isinstance(word, str) and word for word in words):
        choice = " | ".join(literals.of(word + form.json_end) for word in words)
        return [f"{rule}_a: {begin} ({choice}) {literals.of(form.close)}"]
    pattern = WHOLE.fullmatch(str(schema.get("pattern", "")))
    if pattern is not None:  # the first text that has the pattern and is followed by the end
        whole = escaped(f"(?:{pattern[1]})")
        text = literals.after(f"{rule}_t", form.json_end + form.close, whole)
        return [f"{rule}_a: {begin} {rule}_t", text]
    return [f"{rule}_a: {begin} {rule}_t", literals.after(f"{rule}_t", form.close)]


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


def python_arguments(calls: CallRules, name: str, schema: Schema, path: FieldPath) -> str:
    """An expression for all arguments of a call, in the order of the schema; its rules are added.

    name   what the rules' names begin with
    schema of check_schema, at `path` of the request
    Values are JSON, but that true, false and null may be spelt as Python does.
    Raises UnsupportedParameter for an argument whose name Python would not read.
    """
    required = items_of(schema.get("required"))
    properties = fields_of(schema.get("properties"))
    for place, (key, value) in enumerate(properties.items()):
        if not key.isidentifier():
            raise UnsupportedParameter(
                "{} has {!r}: this model writes calls as Python, where an argument's name has "
                "letters, digits and _ only; rename it",
                (path / "properties", key[:64]),
            )
        rule = f"{name}_{place}"
        calls.add_json(rule, schema, key, path)
        spellings = " | ".join([f"@{rule}", *(f"/{word}/" for word in sorted(_words(value)))])
        calls.rules.append(f"{rule}_a: /{literal(key)}=/ ({spellings})")
        # What may follow where nothing stands before it, and where something does.
        here, after = f"{rule}_a {name}_{place + 1}_more", f"{COMMA} {rule}_a"
        if key in required:
            calls.rules.append(f"{rule}_first: {here}")
        else:
            calls.rules.append(f"{rule}_first: {here} | {name}_{place + 1}_first")
            after = f"({after})?"
        calls.rules.append(f"{rule}_more: {after} {name}_{place + 1}_more")
    last = f"{name}_{len(properties)}"
    calls.rules += [f'{last}_first: ""', f'{last}_more: ""']
    return f"{name}_0_first"


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
