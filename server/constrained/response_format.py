"""Grammars for answers: from a request's fields to text that the engine's grammars take.

A `Grammar` is put together here and tried by a `GrammarChecker`, in a process of its own, before
the engine sees it.  Tools are built from the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.apis.openai.response_format_schema import MAX_CHOICES, ResponseFormat, StructuredOutputs
from server.constrained.grammar_text import TEXT, GrammarLiterals, escaped, literal
from server.constrained.json_schema import check_schema, forbid_additional, strict_schema
from server.errors import RequestError
from server.http.validation import fields_of, items_of, kind_of

# At each place one space, or a new line and its indentation: a model that is not sure how to
# continue writes white space for as long as it may.
WHITESPACE = r" |\r?\n( {0,32}|\t{0,16})"
MAX_CHOICE_BYTES = 262_144


@dataclass(frozen=True)
class Grammar:
    """Grammars as the library reads them, the first of which is the answer's."""

    grammars: list[dict[str, Any]]
    # The schemas in it, by the path of the request's field that each came from.
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    param: str = "structured_outputs"  # what to blame if no schema is to blame
    ebnf: bool = False  # one of the grammars is written as GBNF


@dataclass(frozen=True)
class Tag:
    """A JSON value between two delimiters."""

    begin: str
    schema: dict[str, Any]
    end: str
    param: str  # path of the request's field that the schema came from


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
            return _structural_tag(tags, "response_format", literals)
        if requested is None:
            return json_grammar({"type": "object"}, "response_format")
        param = "response_format.json_schema.schema"
        checked = strict_schema if requested.strict else check_schema
        return json_grammar(checked(requested.schema_, param), param)
    return None if structured_outputs is None else _structured(structured_outputs, literals)


def _structured(requested: StructuredOutputs, literals: GrammarLiterals) -> Grammar:
    name = requested.given()[0]
    param = f"structured_outputs.{name}"
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
            f"`structured_outputs.whitespace_pattern` is not a regular expression: {error}",
            param="structured_outputs.whitespace_pattern",
        ) from None


def _lark(text: str, param: str) -> Grammar:
    return Grammar([{"lark_grammar": text}], param=param)


def _object(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """A field that holds a JSON object, or the text of one."""
    if not isinstance(given, str):
        return given
    try:
        value = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"`{param}` is not valid JSON: {error}", param=param) from None
    if kind_of(value) != "object":
        raise RequestError(
            f"`{param}` holds a JSON {kind_of(value)}: it must be an object", param=param
        )
    return fields_of(value)


def json_grammar(
    schema: dict[str, Any], param: str, *, whitespace: str = WHITESPACE, compact: bool = False
) -> Grammar:
    """JSON that follows a schema of check_schema's."""
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": whitespace}
    whole = {**schema, "x-guidance": options}
    return Grammar([{"json_schema": whole}], {param: whole}, param)


def _choice(choices: list[str], param: str) -> Grammar:
    if sum(map(len, choices)) > MAX_CHOICE_BYTES:
        raise RequestError(
            f"`{param}` has {sum(map(len, choices))} characters in all: at most "
            f"{MAX_CHOICE_BYTES} are taken",
            param=param,
        )
    # One terminal: as alternatives of a rule, each would cost time at every token.
    return _lark(f"start: CHOICE\nCHOICE: /{'|'.join(map(literal, choices))}/", param)


def _structural_tag(requested: dict[str, Any], param: str, literals: GrammarLiterals) -> Grammar:
    """vLLM's and SGLang's form: structures of begin, schema, end, and what triggers them."""
    structures = items_of(requested.get("structures"))
    triggers = items_of(requested.get("triggers"))
    if not structures or len(structures) > MAX_CHOICES or not triggers:
        raise RequestError(
            f"`{param}` must have `structures`, 1 to {MAX_CHOICES} objects with `begin`, `schema` "
            "and `end`, and `triggers`, strings that a `begin` starts with",
            param=param,
        )
    tags: list[Tag] = []
    for index, structure in enumerate(structures):
        path = f"{param}.structures[{index}]"
        entry = fields_of(structure)
        begin, schema, end = (entry.get(key) for key in ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(end, str) and kind_of(schema) == "object"):
            raise RequestError(
                f"`{path}` must have `begin` and `end`, strings, and `schema`, an object",
                param=path,
            )
        if not any(isinstance(each, str) and each and begin.startswith(each) for each in triggers):
            raise RequestError(
                f"`{path}.begin` starts with none of `{param}.triggers`", param=f"{path}.begin"
            )
        place = f"{path}.schema"
        tags.append(Tag(begin, check_schema(fields_of(schema), place), end, place))
    return _tagged(tags, [each for each in triggers if isinstance(each, str)], param, literals)


def _tagged(
    tags: Sequence[Tag], triggers: Sequence[str], param: str, literals: GrammarLiterals
) -> Grammar:
    """Any text up to one of `triggers`; then a tag whose `begin` starts with it; then any text."""
    rules: list[str] = []
    names: list[str] = []
    schemas: dict[str, dict[str, Any]] = {}
    grammars: list[dict[str, Any]] = []
    for index, tag in enumerate(tags):
        whole = {**tag.schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        grammars.append({"name": f"schema{index}", "json_schema": whole})
        schemas[tag.param] = whole
        trigger = max((t for t in triggers if tag.begin.startswith(t)), key=len)
        lead = literals.whole_tokens(tag.begin, len(trigger))
        begin, end = literals.of(tag.begin[lead:]), literals.of(tag.end)
        rules.append(literals.after_any(f"lead{index}", tag.begin[:lead]))
        rules.append(f"tag{index}: lead{index} {begin} @schema{index} {end}")
        names.append(f"tag{index}")
    lark = "\n".join([f"start: tag* tail\ntag: {' | '.join(names)}\ntail: {TEXT}", *rules])
    return Grammar([{"lark_grammar": lark}, *grammars], schemas, param)
