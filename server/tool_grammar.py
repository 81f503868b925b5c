"""Grammars that make a model call tools, in its own format.

tool_choice required or a name: the answer is calls and nothing else.  tool_choice auto: it is any
text, in which the calls of strict tools must be right; with a response_format, it is calls or that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.call_arguments import ArgumentForm, arguments
from server.errors import RequestError, UnsupportedParameter
from server.grammar_marks import TEXT, GrammarMarks
from server.json_schema import check_schema
from server.parsing.formats import ReasoningFormat, ToolFormat
from server.schema.chat import ChatRequest
from server.schema.tools import Tool
from server.structured import WHITESPACE, Grammar

MOST_CALLS = 32  # of one answer that must call


@dataclass(frozen=True)
class CallForm:
    """What stands around a call's arguments; NAME is the function's."""

    opens: str  # in free text, what follows it must be a call
    begin: str  # the rest up to the arguments
    end: str
    between: str | None = None  # two calls; None: an answer has one
    arguments: ArgumentForm | None = None  # each by itself; None: they are one JSON object


_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_NAME = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
_PARAMETER = ArgumentForm("<parameter=KEY>\n", "<parameter=KEY>\n", "\n", "</parameter>\n")
_DSML = '<\uff5cDSML\uff5cparameter name="KEY" string='
# By the names of server/parsing/formats.py; those that write calls as Python, and harmony, are not
# here.
FORMS = {
    "hermes": CallForm(
        "<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    "granite": CallForm("<|tool_call|>", '[{"name": "NAME", "arguments": ', "}]"),
    "nemotron_json": CallForm("<TOOLCALL>", '[{"name": "NAME", "arguments": ', "}]</TOOLCALL>"),
    "llama3_json": CallForm('{"name": "', 'NAME", "parameters": ', "}"),
    "mistral": CallForm("[TOOL_CALLS]", "NAME[ARGS]", ""),
    "deepseek_v3": CallForm(
        _DEEPSEEK, f"function{_DEEPSEEK_NAME}NAME\n```json\n", f"\n```{_DEEPSEEK_END}"
    ),
    "deepseek_v31": CallForm(_DEEPSEEK, f"NAME{_DEEPSEEK_NAME}", _DEEPSEEK_END),
    "kimi_k2": CallForm(
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "qwen3_coder": CallForm(
        "<tool_call>",
        "\n<function=NAME>\n",
        "</function>\n</tool_call>",
        between="\n",
        arguments=_PARAMETER,
    ),
    "seed_oss": CallForm(
        "<seed:tool_call>",
        "\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        arguments=ArgumentForm("<parameter=KEY>", "<parameter=KEY>", "", "</parameter>\n"),
    ),
    "minimax_m2": CallForm(
        "<minimax:tool_call>",
        '\n<invoke name="NAME">\n',
        "</invoke>\n</minimax:tool_call>",
        arguments=ArgumentForm(
            '<parameter name="KEY">', '<parameter name="KEY">', "", "</parameter>\n"
        ),
    ),
    "glm45": CallForm(
        "<tool_call>",
        "NAME\n",
        "</tool_call>",
        between="\n",
        arguments=ArgumentForm(
            "<arg_key>KEY</arg_key>\n<arg_value>",
            "<arg_key>KEY</arg_key>\n<arg_value>",
            "",
            "</arg_value>\n",
        ),
    ),
    "deepseek_v32": CallForm(
        "<\uff5cDSML\uff5cfunction_calls>",
        '\n<\uff5cDSML\uff5cinvoke name="NAME">\n',
        "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
        arguments=ArgumentForm(
            f'{_DSML}"true">', f'{_DSML}"false">', "", "</\uff5cDSML\uff5cparameter>\n"
        ),
    ),
}
OLD_MISTRAL = CallForm("[TOOL_CALLS]", '[{"name": "NAME", "arguments": ', "}]")


def form_of(format: ToolFormat, template: str) -> CallForm | None:
    """How a format's calls are enforced; None if they cannot be."""
    if format.name == "mistral" and "[ARGS]" not in template:
        return OLD_MISTRAL
    return FORMS.get(format.name)


def tool_grammar(
    body: ChatRequest,
    wanted: Grammar | None,
    format: ToolFormat | None,
    template: str,
    marks: GrammarMarks,
) -> Grammar | None:
    """The grammar of an answer that may call tools; None if any text will do.

    wanted   of the request's response_format or structured_outputs
    template the chat template's source
    Raises RequestError if the model's format cannot be enforced, or a tool's schema.
    """
    tools = body.offered()
    if (name := body.named_tool()) is not None:
        tools = [(index, tool) for index, tool in tools if tool.function.name == name]
    strict = [(index, tool) for index, tool in tools if tool.function.strict]
    if not (body.must_call() or strict or (tools and wanted is not None)):
        return wanted
    form = None if format is None else form_of(format, template)
    if form is None:
        raise _cannot(body, format)
    most = MOST_CALLS if form.between is not None else 1
    if body.parallel_tool_calls is False:
        most = 1
    if body.must_call():
        return _only_calls(tools, form, most, marks, None)
    if wanted is not None:
        return _only_calls(tools, form, most, marks, wanted)
    return _among_text(tools, form, most, marks)


def _cannot(body: ChatRequest, format: ToolFormat | None) -> RequestError:
    param = "tools" if not body.must_call() else "tool_choice"
    what = "`tool_choice`" if body.must_call() else "`strict` tools, or tools with a format,"
    known = "none is known" if format is None else f"theirs is {format.name}"
    return RequestError(
        f"{what} cannot be enforced for this model: of the formats in which models write calls, "
        f'{known}, and {", ".join(FORMS)} can be: use "auto", and functions that are not strict',
        param=param,
        code="unsupported_parameter",
    )


def _rules(
    tools: Sequence[tuple[int, Tool]], form: CallForm, marks: GrammarMarks, *, all_strict: bool
) -> tuple[list[str], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Rules of the calls from their name on, the grammars of their arguments, schemas by path.

    all_strict  also functions that are not strict get the arguments that their schema asks for
    """
    rules = ["call: " + " | ".join(f"call{index}" for index, _ in tools)]
    grammars: list[dict[str, Any]] = []
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in tools:
        path = f"tools[{index}].function.parameters"
        schema: dict[str, Any] = {}
        bound = all_strict or bool(tool.function.strict)
        if bound:
            schema = check_schema(tool.function.parameters or {}, path)
        begin = marks.of(form.begin.replace("NAME", tool.function.name))
        if form.arguments is not None:
            if not bound:
                rules.append(f"call{index}: {begin} free{index}")
                rules.append(marks.after_any(f"free{index}", form.end))
                continue
            written, parts = arguments(
                f"argument{index}", schema, path, form.arguments, marks, WHITESPACE
            )
            rules += [f"call{index}: {begin} {written} {marks.of(form.end)}", *parts.rules]
            grammars += parts.grammars
            schemas |= parts.schemas
            continue
        whole = {"type": "object", **schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        grammars.append({"name": f"arguments{index}", "json_schema": whole})
        schemas[path] = whole
        rules.append(f"call{index}: {begin} @arguments{index} {marks.of(form.end)}".rstrip())
    return rules, grammars, schemas


def _only_calls(
    tools: Sequence[tuple[int, Tool]],
    form: CallForm,
    most: int,
    marks: GrammarMarks,
    instead: Grammar | None,
) -> Grammar:
    """Calls and nothing else, or the answer that `instead` describes."""
    rules, grammars, schemas = _rules(tools, form, marks, all_strict=True)
    opens = marks.of(form.opens)
    more = f" ({marks.of(form.between or '')} {opens} call){{0,{most - 1}}}" if most > 1 else ""
    start = "start: calls"
    if instead is not None:
        start = "start: calls | @instead"
        first, *others = instead.grammars
        grammars += [{**first, "name": "instead"}, *others]
        schemas |= instead.schemas
    lark = "\n".join([start, f"calls: {opens} call{more}", *rules])
    return Grammar([{"lark_grammar": lark}, *grammars], schemas, "tools")


def _among_text(
    tools: Sequence[tuple[int, Tool]], form: CallForm, most: int, marks: GrammarMarks
) -> Grammar:
    """Any text; a call that is begun must be one of these tools, with the arguments of strict ones
    as their schemas say."""
    rules, grammars, schemas = _rules(tools, form, marks, all_strict=False)
    start = [
        f"start: (lead call){{0,{most}}} tail",
        marks.after_any("lead", form.opens),
        f"tail: {TEXT}",
    ]
    lark = "\n".join([*start, *rules])
    return Grammar([{"lark_grammar": lark}, *grammars], schemas, "tools")


def after_thought(
    grammar: Grammar, reasoning: ReasoningFormat, marks: GrammarMarks, *, begun: bool
) -> Grammar:
    """The same after reasoning, which the prompt has begun or the answer may begin."""
    if reasoning.name == "harmony":
        raise UnsupportedParameter(
            f"`{grammar.param}` cannot be enforced for a model that writes in harmony's channels: "
            "ask for it in a message",
            param=grammar.param,
        )
    first, *others = grammar.grammars
    before = "thought /\\s{0,4}/"
    if not begun:
        before = f"({marks.of(reasoning.opens[0])} {before})?"
    lark = f"start: {before} @answer\n{marks.after_any('thought', reasoning.closes[0])}"
    inner = {**first, "name": "answer"}
    return Grammar(
        [{"lark_grammar": lark}, inner, *others], grammar.schemas, grammar.param, grammar.ebnf
    )
