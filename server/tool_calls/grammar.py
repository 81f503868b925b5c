"""Grammars that make a model call tools, in its own format.

tool_choice required or a name: the answer is calls and nothing else.  tool_choice auto: it is any
text, in which the calls of strict tools must be right; with a response_format, it is calls or that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.tools_schema import INPUT, Tool
from server.constrained.grammar_text import TEXT, GrammarMarks, literal
from server.constrained.json_schema import check_schema, strict_schema
from server.constrained.reasoning_grammar import CHANNEL, MESSAGE, NEXT, as_rule
from server.constrained.response_format import WHITESPACE, Grammar
from server.errors import RequestError, UnsupportedParameter
from server.tool_calls.arguments import (
    FREE_RULES,
    ArgumentParts,
    arguments,
    python_arguments,
)
from server.tool_calls.format_types import ToolFormat
from server.tool_calls.written_form import ArgumentForm, CallForm, written_form

MAX_CALLS = 32  # of one answer that must call
MAX_REPEATED = 4 << 20  # bytes of definitions, where each argument has a grammar of its own
Offered = Sequence[tuple[int, Tool]]  # with their places in the request's `tools`


def tool_grammar(
    body: ChatRequest,
    wanted: Grammar | None,
    format: ToolFormat | None,
    template: str,
    marks: GrammarMarks,
    *,
    thoughts: bool = True,
) -> Grammar | None:
    """The grammar of an answer that may call tools; None if any text will do.

    wanted   of the request's response_format or structured_outputs
    template the chat template's source
    thoughts whether there may be some between harmony's messages; False: at most one before them,
             of limited length
    Raises RequestError if the model's format is not known, or for a tool's schema.
    """
    tools = body.offered()
    if (name := body.named_tool()) is not None:
        tools = [(index, tool) for index, tool in tools if tool.function.name == name]
    strict = [(index, tool) for index, tool in tools if tool.function.strict]
    if not (body.must_call() or strict or (tools and wanted is not None)):
        return wanted
    if format is None:
        raise _cannot(body)
    form = written_form(format, template)
    most = 1 if body.one_call() else MAX_CALLS
    if body.must_call():
        return _only_calls(tools, form, most, marks, None)
    if wanted is not None:
        return _only_calls(tools, form, most, marks, wanted, as_rules=not thoughts)
    if format.style == "harmony":
        return _among_messages(tools, form, marks, thoughts=thoughts)
    return _among_text(tools, form, most, marks)


def _cannot(body: ChatRequest) -> RequestError:
    param = "tools" if not body.must_call() else "tool_choice"
    what = "`tool_choice`" if body.must_call() else "`strict` tools, or tools with a format,"
    return RequestError(
        f"{what} cannot be enforced for this model: how it writes calls is not known; use "
        '"auto" and functions that are not strict, or start the server with --tool-format',
        param=param,
        code="unsupported_parameter",
    )


def _rules(
    tools: Offered, form: CallForm, marks: GrammarMarks, *, all_strict: bool
) -> ArgumentParts:
    """Of the calls: call and, by index, call0 = begin0 rest0, ...

    all_strict  also functions that are not strict get the arguments that their schema asks for
    """
    parts = ArgumentParts(["call: " + " | ".join(f"call{index}" for index, _ in tools)])
    for index, tool in tools:
        path = f"tools[{index}].function.parameters"
        bound = all_strict or bool(tool.function.strict)
        checked = strict_schema if tool.function.strict else check_schema
        schema = checked(tool.function.parameters or {}, path) if bound else None
        if tool.lark is None or not bound:
            written, more = _arguments(index, schema, path, form, marks)
        else:
            written, more = _lark_input(index, tool.lark, form, marks)
        begin = marks.of(form.begin.replace("NAME", tool.function.name))
        parts.rules += [f"call{index}: {begin} rest{index}", f"rest{index}: {written}".rstrip()]
        parts.rules += more.rules
        parts.grammars += more.grammars
        parts.schemas |= more.schemas
        parts.repeated += more.repeated
        if parts.repeated > MAX_REPEATED:
            raise RequestError(
                f"the definitions of `{path}` are repeated for each argument that refers to them, "
                f"which makes more than {MAX_REPEATED} bytes: write small ones in place of $ref",
                param=path,
            )
    if form.arguments == "python":
        parts.rules += FREE_RULES
    return parts


def _arguments(
    index: int, schema: dict[str, Any] | None, path: str, form: CallForm, marks: GrammarMarks
) -> tuple[str, ArgumentParts]:
    """From the arguments to the end of a call: an expression, and the rules for it.

    schema  None: the arguments are free
    """
    name, end = f"argument{index}", marks.of(form.end)
    if form.arguments == "python":
        if schema is None:
            return f"python_free {end}", ArgumentParts()
        written, parts = python_arguments(name, schema, path, WHITESPACE)
    elif form.arguments is not None:
        if schema is None:
            return f"free{index}", ArgumentParts([marks.after_any(f"free{index}", form.end)])
        written, parts = arguments(name, schema, path, form.arguments, marks, WHITESPACE)
    else:
        whole = {"type": "object", **(schema or {})}
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE}
        grammar = {"name": f"arguments{index}", "json_schema": whole}
        written, parts = f"@arguments{index}", ArgumentParts([], [grammar], {path: whole})
    return f"{written} {end}", parts


def _lark_input(
    index: int, lark: str, form: CallForm, marks: GrammarMarks
) -> tuple[str, ArgumentParts]:
    """The same of a custom tool.  Raises UnsupportedParameter where it cannot be enforced."""
    if not isinstance(form.arguments, ArgumentForm):
        path = f"tools[{index}].custom.format.grammar.syntax"
        raise UnsupportedParameter(
            f"`{path}` is lark, which cannot be enforced inside of the strings in which this model "
            "writes its calls: use regex, or the format text",
            param=path,
        )
    begin = marks.of(form.arguments.text.replace("KEY", INPUT))
    end = marks.of(form.arguments.json_end + form.arguments.close + form.end)
    grammar = {"name": f"input{index}", "lark_grammar": lark}
    return f"{begin} @input{index} {end}", ArgumentParts([], [grammar])


def _only_calls(
    tools: Offered,
    form: CallForm,
    most: int,
    marks: GrammarMarks,
    instead: Grammar | None,
    *,
    as_rules: bool = False,
) -> Grammar:
    """Calls and nothing else, or the answer that `instead` describes.

    as_rules    it is one of harmony's messages, see thought_grammar.as_rule
    """
    parts = _rules(tools, form, marks, all_strict=True)
    more = ""
    if form.between is not None and most > 1:
        more = f" ({marks.of(form.between)} section){{0,{most - 1}}}"
    start = "start: calls"
    grammars, schemas = parts.grammars, parts.schemas
    if instead is not None:
        first, *others = instead.grammars
        if as_rules:
            rules, others = as_rule(instead, "instead")
            start = f"start: calls | instead\n{rules}"
        else:
            start = "start: calls | @instead"
            others = [{**first, "name": "instead"}, *others]
        grammars = [*grammars, *others]
        schemas = schemas | instead.schemas
    section = f"section: {marks.of(form.opens)} {marks.of(form.head)} {_section(form, most, marks)}"
    lark = "\n".join([start, f"calls: section{more}", section, *parts.rules])
    return Grammar([{"lark_grammar": lark}, *grammars], schemas, "tools")


def _section(form: CallForm, most: int, marks: GrammarMarks, first: str = "call") -> str:
    """What follows a section's `opens` and `head`, or the beginning of its first call."""
    more = ""
    if form.comma is not None and most > 1:
        more = f"({marks.of(form.comma)} call){{0,{most - 1}}}"
    return f"{first} {more} {marks.of(form.close)}".rstrip()


def _among_text(tools: Offered, form: CallForm, most: int, marks: GrammarMarks) -> Grammar:
    """Any text; a call that is begun must be one of these tools, with the arguments of strict ones
    as their schemas say."""
    parts = _rules(tools, form, marks, all_strict=False)
    sections = most if form.between is not None else 1
    rules = [f"start: section{{0,{sections}}} tail", f"tail: {TEXT}"]
    if form.named:
        rules.append("section: " + " | ".join(f"section{index}" for index, _ in tools))
        for index, tool in tools:
            begin = f"{literal(form.opens)}\\s*{literal(tool.function.name)}\\("
            rules.append(f"lead{index}[lazy]: /(?s:.*){begin}/")
            rest = _section(form, most, marks, f"rest{index}")
            rules.append(f"section{index}: lead{index} {rest}")
    else:
        rules.append(marks.after_any("lead", form.opens))
        rules.append(f"section: lead {marks.of(form.head)} {_section(form, most, marks)}")
    lark = "\n".join([*rules, *parts.rules])
    return Grammar([{"lark_grammar": lark}, *parts.grammars], parts.schemas, "tools")


def _among_messages(
    tools: Offered, form: CallForm, marks: GrammarMarks, *, thoughts: bool
) -> Grammar:
    """The same in harmony, where text may only stand in messages."""
    parts = _rules(tools, form, marks, all_strict=False)
    message, channel = marks.of(MESSAGE), marks.of(CHANNEL)
    told = "analysis|commentary" if thoughts else "commentary"
    lark = "\n".join(
        [
            "start: told* last",
            f"told: {channel} /{told}/ {message} told_text",
            marks.after_any("told_text", NEXT),
            f"last: {marks.of(form.opens)} call | {channel} /final/ {message} {TEXT}",
            *parts.rules,
        ]
    )
    return Grammar([{"lark_grammar": lark}, *parts.grammars], parts.schemas, "tools")
