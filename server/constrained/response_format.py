"""Grammars for answers: from a request's response_format or structured_outputs to a `Grammar`.

A `GrammarChecker` tries it, in a process of its own, before the engine sees it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from server.apis.openai.response_format_schema import MAX_CHOICES, ResponseFormat, StructuredOutputs
from server.constrained.grammar_text import (
    TEXT,
    WHITESPACE,
    Grammar,
    GrammarLiterals,
    Path,
    escaped,
    literal,
    with_whitespace,
)
from server.constrained.json_schema import check_schema, check_total
from server.constrained.strict_schema import forbid_additional, relaxed_schema, strict_schema
from server.errors import FieldPath, RequestError
from server.http.validation import fields_of, items_of, kind_of

MAX_CHOICE_CHARS = 262_144


def format_grammar(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    literals: GrammarLiterals,
) -> Grammar | None:
    """The grammar of an answer; None if any text will do.

    Raises RequestError for what is wrong at first sight; GrammarChecker finds the rest.
    """
    if response_format is not None and response_format.type != "text":
        requested = response_format.json_schema
        if response_format.structures is not None:
            tags = {"structures": response_format.structures, "triggers": response_format.triggers}
            return _structural_tag(tags, FieldPath("response_format"), literals)
        if requested is None:
            return json_grammar({"type": "object"}, FieldPath("response_format"))
        param = FieldPath("response_format", "json_schema", "schema")
        checked = strict_schema if requested.strict else relaxed_schema
        return json_grammar(checked(requested.schema_, param), param)
    return None if structured_outputs is None else _structured(structured_outputs, literals)


def _structured(requested: StructuredOutputs, literals: GrammarLiterals) -> Grammar:
    name = requested.constraints()[0]
    param = FieldPath("structured_outputs", name)
    if name == "json" or name == "json_object":
        schema = {"type": "object"} if requested.json_ is None else _object(requested.json_, param)
        schema = check_schema(schema, param)
        _check_whitespace(requested.whitespace_pattern)
        if requested.disable_additional_properties:
            schema = forbid_additional(schema)
        return json_grammar(
            schema,
            param,
            whitespace=requested.whitespace_pattern or WHITESPACE,
            compact=bool(requested.disable_any_whitespace),
        )
    if requested.regex is not None:
        return _lark(f"start: /{escaped(requested.regex)}/", param)
    if requested.choice is not None:
        return _choice(requested.choice, param)
    if requested.structural_tag is not None:
        return _structural_tag(_object(requested.structural_tag, param), param, literals)
    assert requested.grammar is not None
    return Grammar(
        [{"lark_grammar": requested.grammar}], param=param, ebnf="::=" in requested.grammar
    )


def _check_whitespace(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(
            "{structured_outputs.whitespace_pattern} is not a regular expression: {}", error
        ) from None


def _lark(text: str, param: FieldPath) -> Grammar:
    return Grammar([{"lark_grammar": text}], param=param)


def _object(field: dict[str, Any] | str, param: FieldPath) -> dict[str, Any]:
    """A field that holds a JSON object, or the text of one."""
    if not isinstance(field, str):
        return field
    try:
        value = orjson.loads(field)
    except orjson.JSONDecodeError as error:
        raise RequestError("{} is not valid JSON: {}", (param, error)) from None
    if kind_of(value) != "object":
        raise RequestError("{} holds a JSON {}: it must be an object", (param, kind_of(value)))
    return fields_of(value)


def json_grammar(
    schema: dict[str, Any], param: FieldPath, *, whitespace: str = WHITESPACE, compact: bool = False
) -> Grammar:
    """JSON that follows a schema of check_schema's."""
    whole = with_whitespace(schema, whitespace)
    if compact:
        whole["x-guidance"] = {"whitespace_flexible": False}
    return Grammar([{"json_schema": whole}], [(param, whole)], param)


def _choice(choices: list[str], param: FieldPath) -> Grammar:
    size = sum(map(len, choices))
    if size > MAX_CHOICE_CHARS:
        raise RequestError(
            "{} has {} characters in all: at most {} are taken", (param, size, MAX_CHOICE_CHARS)
        )
    # One terminal: as alternatives of a rule, each would cost time at every token.
    return _lark(f"start: CHOICE\nCHOICE: /{'|'.join(map(literal, choices))}/", param)


def _structural_tag(
    requested: dict[str, Any], param: FieldPath, literals: GrammarLiterals
) -> Grammar:
    """vLLM's and SGLang's form: structures of begin, schema, end, and what triggers them.

    The answer is any text up to one of `triggers`, then a structure whose `begin` starts with it,
    then any text.
    """
    structures = items_of(requested.get("structures"))
    triggers = items_of(requested.get("triggers"))
    if not structures or len(structures) > MAX_CHOICES or not triggers:
        raise RequestError(
            "{} must have `structures`, 1 to {} objects with `begin`, `schema` and `end`, and "
            "`triggers`, strings that a `begin` starts with",
            (param, MAX_CHOICES),
        )
    check_total((fields_of(each).get("schema") for each in structures), param / "structures")
    rules: list[str] = []
    schemas: list[tuple[Path, dict[str, Any]]] = []
    for index, structure in enumerate(structures):
        path = param / "structures" / index
        entry = fields_of(structure)
        begin, schema, end = (entry.get(key) for key in ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(end, str) and kind_of(schema) == "object"):
            raise RequestError(
                "{} must have `begin` and `end`, strings, and `schema`, an object", path
            )
        fitting = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
        if not fitting:
            raise RequestError("{} starts with none of {}", (path / "begin", param / "triggers"))
        place = path / "schema"
        checked = check_schema(fields_of(schema), place)
        schemas.append((place, with_whitespace(checked)))
        lead = literals.whole_tokens(begin, len(max(fitting, key=len)))
        rules.append(literals.after(f"lead{index}", begin[:lead]))
        rest, end = literals.of(begin[lead:]), literals.of(end)
        rules.append(f"tag{index}: lead{index} {rest} @schema{index} {end}")
    tags = " | ".join(f"tag{index}" for index in range(len(structures)))
    lark = "\n".join([f"start: tag* tail\ntag: {tags}\ntail: {TEXT}", *rules])
    named = [
        {"name": f"schema{index}", "json_schema": schema}
        for index, (_, schema) in enumerate(schemas)
    ]
    return Grammar([{"lark_grammar": lark}, *named], schemas, param)
