"""How calls are enforced, by format: what a grammar puts around their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.tool_calls.arguments import ArgumentForm
from server.tool_calls.formats import ToolFormat


@dataclass(frozen=True)
class CallForm:
    """A section of calls: opens, head, begin ARGUMENTS end, maybe comma and another call, close.

    NAME is the function's.
    """

    opens: str  # in free text, what follows it must be a call
    begin: str  # from there, or from `head`, to the arguments
    end: str
    head: str = ""
    close: str = ""
    comma: str | None = None  # between two calls of a section; None: it has one
    between: str | None = None  # two sections; None: an answer has one
    # None: the arguments are one JSON object; a form: each stands by itself between marks
    arguments: ArgumentForm | Literal["python"] | None = None
    named: bool = False  # in free text, `opens` counts only before a tool's name and bracket


_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_NAME = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
_PARAMETER = ArgumentForm("<parameter=KEY>\n", "<parameter=KEY>\n", "\n", "</parameter>\n")
_DSML = '<\uff5cDSML\uff5cparameter name="KEY" string='
# By the names of server/tool_calls/formats.py.
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
    "pythonic": CallForm("[", "NAME(", ")", close="]", comma=", ", arguments="python", named=True),
    "lfm2": CallForm(
        "<|tool_call_start|>",
        "NAME(",
        ")",
        head="[",
        close="]<|tool_call_end|>",
        comma=", ",
        arguments="python",
    ),
    "olmo3": CallForm(
        "<function_calls>",
        "NAME(",
        ")",
        close="</function_calls>",
        comma="\n",
        arguments="python",
    ),
    # Its end mark is a token that ends answers.
    "harmony": CallForm(
        "<|channel|>commentary to=functions.", "NAME <|constrain|>json<|message|>", ""
    ),
}
OLD_MISTRAL = CallForm("[TOOL_CALLS]", '[{"name": "NAME", "arguments": ', "}]")


def form_of(format: ToolFormat, template: str) -> CallForm:
    """How a format's calls are enforced; `template` is the chat template's source."""
    if format.name == "mistral" and "[ARGS]" not in template:
        return OLD_MISTRAL
    return FORMS[format.name]
