"""Grammars that make a model call tools, in its own format.

tool_choice required or a name: the answer is calls and nothing else.  tool_choice auto: it is any
text, in which the calls of strict tools must be right; with a response_format, it is calls or that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.tools_schema import INPUT, Tool
from server.constrained.grammar_text import TEXT, Grammar, GrammarLiterals, literal, with_whitespace
from server.constrained.json_schema import check_total
from server.constrained.reasoning_grammar import CHANNEL, MESSAGE, NEXT, as_rule
from server.constrained.strict_schema import relaxed_schema, strict_schema
from server.errors import FieldPath, UnsupportedParameter
from server.tool_calls.arguments import FREE_RULES, CallRules, arguments, python_arguments
from server.tool_calls.format_types import ArgumentForm, CallForm, ToolFormat, written_form

MAX_CALLS = 32  # of one answer that must call
Offered = Sequence[tuple[int, Tool]]  # with their places in the request's `tools`


def tool_grammar(
    body: ChatRequest,
    requested: Grammar | None,
    format: ToolFormat | None,
    template: str,
    literals: GrammarLiterals,
    *,
    reasoning_between: bool = True,
) -> Grammar | None:
    """The grammar of an answer that may call tools; None if any text will do.

    requested          of the request's response_format or structured_outputs
    template           the chat template's source
    reasoning_between  whether harmony's messages may have reasoning between them; False: at most
                       one message of it before them, of limited length
    Raises RequestError if the model's format is not known, or for a tool's schema.
    """
    tools = body.offered()
    if (name := body.named_tool()) is not None:
        tools = [(index, tool) for index, tool in tools if tool.function.name == name]
    strict = any(tool.function.strict for _, tool in tools)
    if not (body.must_call() or strict or (tools and requested is not None)):
        return requested
    if format is None:
        raise _unenforceable(body)
    form = written_form(format, template)
    all_strict = body.must_call() or requested is not None
    calls = _rules(tools, form, literals, all_strict=all_strict)
    max_calls = 1 if body.one_call() else MAX_CALLS
    if body.must_call():
        return _only_calls(calls, max_calls, None)
    if requested is not None:
        return _only_calls(calls, max_calls, requested, as_rules=not reasoning_between)
    if format.style == "harmony":
        return _calls_in_messages(calls, reasoning_between=reasoning_between)
    return _calls_in_text(calls, tools, max_calls)


def _unenforceable(body: ChatRequest) -> UnsupportedParameter:
    what = "{tool_choice}" if body.must_call() else "`strict` tools, or tools with a format,"
    return UnsupportedParameter(
        what + " cannot be enforced for this model: how it writes calls is not known; use "
        '"auto" and functions that are not strict, or start the server with --tool-format',
        param=FieldPath("tool_choice" if body.must_call() else "tools"),
    )


def _rules(
    tools: Offered, form: CallForm, literals: GrammarLiterals, *, all_strict: bool
) -> CallRules:
    """Of the calls: call and, by index, call0 = begin0 rest0, ...

    all_strict  also functions that are not strict get arguments that fit their schema
    """
    functions = [tool.function for _, tool in tools if all_strict or tool.function.strict]
    check_total((function.parameters for function in functions), FieldPath("tools"))
    calls = CallRules(form, literals)
    calls.rules.append("call: " + " | ".join(f"call{index}" for index, _ in tools))
    for index, tool in tools:
        path = FieldPath("tools", index, "function", "parameters")
        bound = all_strict or bool(tool.function.strict)
        checked = strict_schema if tool.function.strict else relaxed_schema
        schema = checked(tool.function.parameters or {}, path) if bound else None
        place = len(calls.rules)
        if tool.lark is None or not bound:
            rest = _arguments(calls, index, schema, path)
        else:
            rest = _lark_input(calls, index, tool.lark)
        begin = literals.of(form.begin.replace("NAME", tool.function.name))
        rules = [f"call{index}: {begin} rest{index}", f"rest{index}: {rest}".rstrip()]
        calls.rules[place:place] = rules
    if form.arguments == "python":
        calls.rules += FREE_RULES
    return calls


def _arguments(calls: CallRules, index: int, schema: dict[str, Any] | None, path: FieldPath) -> str:
    """An expression from the arguments to the end of a call; its rules are added to `calls`.

    schema  None: the arguments are free
    """
    form, literals = calls.form, calls.literals
    name, end = f"argument{index}", literals.of(form.end)
    if form.arguments == "python":
        if schema is None:
            return f"python_free {end}"
        return f"{python_arguments(calls, name, schema, path)} {end}"
    if form.arguments is not None:
        if schema is None:
            calls.rules.append(literals.after(f"free{index}", form.end))
            return f"free{index}"
        return f"{arguments(calls, name, schema, path, form.arguments)} {end}"
    whole = with_whitespace({"type": "object", **(schema or {})})
    calls.add_schema(f"arguments{index}", whole, path)
    return f"@arguments{index} {end}"


def _lark_input(calls: CallRules, index: int, lark: str) -> str:
    """An expression from the input of a custom tool to the end of a call.

    Raises UnsupportedParameter where it cannot be enforced.
    """
    form, literals = calls.form, calls.literals
    if not isinstance(form.arguments, ArgumentForm):
        path = FieldPath("tools", index, "custom", "format", "grammar", "syntax")
        raise UnsupportedParameter(
            "{} is lark, which cannot be enforced inside of the strings in which this model "
            "writes its calls: use regex, or the format text",
            path,
        )
    begin = literals.of(form.arguments.text.replace("KEY", INPUT))
    end = literals.of(form.arguments.json_end + form.arguments.close + form.end)
    calls.grammars.append({"name": f"input{index}", "lark_grammar": lark})
    return f"{begin} @input{index} {end}"


def _only_calls(
    calls: CallRules, max_calls: int, instead: Grammar | None, *, as_rules: bool = False
) -> Grammar:
    """Calls and nothing else, or the answer that `instead` describes.

    as_rules    it is one of harmony's messages, see reasoning_grammar.as_rule
    """
    form, literals = calls.form, calls.literals
    more = ""
    if form.between is not None and max_calls > 1:
        more = f" ({literals.of(form.between)} section){{0,{max_calls - 1}}}"
    start = "start: calls"
    if instead is not None:
        if as_rules:
            rules, others = as_rule(instead, "instead")
            start = f"start: calls | instead\n{rules}"
        else:
            first, *others = instead.grammars
            start = "start: calls | @instead"
            others = [{**first, "name": "instead"}, *others]
        calls.grammars += others
        calls.schemas += instead.schemas
    opens = f"{literals.of(form.opens)} {literals.of(form.head)}"
    section = f"section: {opens} {_section(calls, max_calls)}"
    return calls.grammar(start, f"calls: section{more}", section)


def _section(calls: CallRules, max_calls: int, first: str = "call") -> str:
    """What follows a section's `opens` and `head`, or the beginning of its first call."""
    form, literals = calls.form, calls.literals
    more = ""
    if form.comma is not None and max_calls > 1:
        more = f"({literals.of(form.comma)} call){{0,{max_calls - 1}}}"
    return f"{first} {more} {literals.of(form.close)}".rstrip()


def _calls_in_text(calls: CallRules, tools: Offered, max_calls: int) -> Grammar:
    """Any text; a call in it must be of one of these tools, with arguments that fit the schemas of
    strict ones."""
    form, literals = calls.form, calls.literals
    sections = max_calls if form.between is not None else 1
    rules = [f"start: section{{0,{sections}}} tail", f"tail: {TEXT}"]
    if form.named:
        rules.append("section: " + " | ".join(f"section{index}" for index, _ in tools))
        for index, tool in tools:
            begin = f"{literal(form.opens)}\\s*{literal(tool.function.name)}\\("
            rules.append(f"lead{index}[lazy]: /(?s:.*){begin}/")
            rest = _section(calls, max_calls, f"rest{index}")
            rules.append(f"section{index}: lead{index} {rest}")
    else:
        rules.append(literals.after("lead", form.opens))
        section = _section(calls, max_calls)
        rules.append(f"section: lead {literals.of(form.head)} {section}")
    return calls.grammar(*rules)


def _calls_in_messages(calls: CallRules, *, reasoning_between: bool) -> Grammar:
    """Harmony's messages, in which calls must be as in _calls_in_text."""
    literals = calls.literals
    message, channel = literals.of(MESSAGE), literals.of(CHANNEL)
    channels = "analysis|commentary" if reasoning_between else "commentary"
    return calls.grammar(
        "start: text* last",
        f"text: {channel} /{channels}/ {message} text_end",
        literals.after("text_end", NEXT),
        f"last: {literals.of(calls.form.opens)} call | {channel} /final/ {message} {TEXT}",
    )
