"""Tool calls in each format, written out here instead of taken from the server's tables."""

# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines

from __future__ import annotations

import json
from typing import NamedTuple


class Written(NamedTuple):
    """What stands around the arguments of one call.

    The arguments are one JSON object, unless there is `argument`: then each stands by itself, its
    KEY and VALUE written so, and IS_TEXT says whether it is a text.
    """

    before: str  # NAME is the function's
    after: str
    argument: str = ""


_CALLS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_ENDS = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
IN_JSON = {
    "hermes": Written('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "granite": Written('<|tool_call|>[{"name": "NAME", "arguments": ', "}]"),
    "nemotron_json": Written('<TOOLCALL>[{"name": "NAME", "arguments": ', "}]</TOOLCALL>"),
    "llama3_json": Written('{"name": "NAME", "parameters": ', "}"),
    "mistral": Written("[TOOL_CALLS]NAME[ARGS]", ""),
    "old mistral": Written('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    "deepseek_v3": Written(f"{_CALLS}function<｜tool▁sep｜>NAME\n```json\n", f"\n```{_ENDS}"),
    "deepseek_v31": Written(f"{_CALLS}NAME<｜tool▁sep｜>", _ENDS),
    "kimi_k2": Written(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "harmony": Written(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "",
    ),
}
BETWEEN_MARKS = {
    "qwen3_coder": Written(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "seed_oss": Written(
        "<seed:tool_call>\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>\n",
    ),
    "minimax_m2": Written(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        "</invoke>\n</minimax:tool_call>",
        '<parameter name="KEY">VALUE</parameter>\n',
    ),
    "glm45": Written(
        "<tool_call>NAME\n",
        "</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "deepseek_v32": Written(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n',
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        '<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n',
    ),
}
# What stands before, between and behind the calls of a list.
PYTHON = {
    "pythonic": ("[", ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "\n", "</function_calls>"),
}
NAMES = (*IN_JSON, *BETWEEN_MARKS, *PYTHON)
# Formats in which a call that must be made may be followed by others: one call a line, or a list.
SEVERAL = {"hermes", "qwen3_coder", "glm45", *PYTHON}


def call(format: str, function: str, arguments: str) -> str:
    """One call, as a whole answer.  arguments: a JSON object"""
    if format in PYTHON:
        items = json.loads(arguments).items()
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in items)
        return python_calls(format, f"{function}({given})")
    written = IN_JSON.get(format) or BETWEEN_MARKS[format]
    if written.argument:
        items = json.loads(arguments).items()
        arguments = "".join([_argument(written.argument, *item) for item in items])
    return written.before.replace("NAME", function) + arguments + written.after


def calls_without_arguments(format: str, function: str, number: int) -> str:
    """As many calls in one answer, one behind the other where the format has no list of them."""
    if format in PYTHON:
        return python_calls(format, *[f"{function}()"] * number)
    return ("\n" if format in SEVERAL else "").join([call(format, function, "{}")] * number)


def _argument(written: str, key: str, value: object) -> str:
    is_text = isinstance(value, str)
    shown = value if isinstance(value, str) else json.dumps(value)
    with_key = written.replace("IS_TEXT", "true" if is_text else "false").replace("KEY", key)
    return with_key.replace("VALUE", shown)


def python_calls(format: str, *calls: str) -> str:
    """A list of calls in Python's form, as a whole answer."""
    before, between, behind = PYTHON[format]
    return before + between.join(calls) + behind
