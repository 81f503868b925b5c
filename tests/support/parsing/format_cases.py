"""Calls as the models of each format write them, spelt out: not taken from the server's table."""

# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.parsing.parsing_texts import GLM_BONN, GLM_OSLO, KIMI

PYTHON_ARGUMENT = "KEY=VALUE"


class FormatCase(NamedTuple):
    """How a format's calls are written. `begin`, the calls with `between` them, `end` are what its
    grammar enforces where a call is required."""

    call: str  # one call: NAME is the function's, ARGUMENTS a JSON object, or each an `argument`
    begin: str = ""
    between: str = ""
    end: str = ""
    argument: str = ""  # with its KEY and VALUE, and IS_TEXT for whether the value is a string
    value_end: str = ""  # what a value between delimiters cannot contain
    several: bool = False  # a required call may be followed by others
    template: str = ""  # of a chat template; "" where test_parsing_detect.py has one
    answer: str = ""  # the calls OSLO and BONN with other white space, quotes or ids


FORMAT_CASES = {
    "hermes": FormatCase(
        '{"name": "NAME", "arguments": ARGUMENTS}',
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        several=True,
    ),
    "granite": FormatCase('{"name": "NAME", "arguments": ARGUMENTS}', "<|tool_call|>[", ", ", "]"),
    "nemotron_json": FormatCase(
        '{"name": "NAME", "arguments": ARGUMENTS}', "<TOOLCALL>[", ", ", "]</TOOLCALL>"
    ),
    "llama3_json": FormatCase(
        '{"name": "NAME", "parameters": ARGUMENTS}',
        between="; ",
        answer='<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "weather", "parameters": {"city": "Bonn", "days": 3}}',
    ),
    "mistral": FormatCase(
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        template="{{ '[TOOL_CALLS]' + calls }}",
        answer='[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
        '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Bonn", "days": 3}',
    ),
    "old mistral": FormatCase(
        '{"name": "NAME", "arguments": ARGUMENTS}',
        "[TOOL_CALLS][",
        ", ",
        "]",
        answer='[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "weather", "arguments": {"city": "Bonn", "days": 3}, "id": "a1b2c3d4e"}]',
    ),
    "deepseek_v3": FormatCase(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": FormatCase(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": FormatCase(
        '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>',
        "<｜DSML｜function_calls>\n",
        "\n",
        "\n</｜DSML｜function_calls>",
        argument='<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n',
        value_end="</｜DSML｜parameter>",
    ),
    "kimi_k2": FormatCase(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
        answer=KIMI,
    ),
    "harmony": FormatCase(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        between="<|call|><|start|>assistant",
    ),
    "qwen3_coder": FormatCase(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        between="\n",
        argument="<parameter=KEY>\nVALUE\n</parameter>\n",
        value_end="</parameter>",
        several=True,
        template="{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>\\n' }}",
    ),
    "seed_oss": FormatCase(
        "<function=NAME>\nARGUMENTS</function>\n",
        "<seed:tool_call>\n",
        "</seed:tool_call>\n<seed:tool_call>\n",
        "</seed:tool_call>",
        argument="<parameter=KEY>VALUE</parameter>\n",
        value_end="</parameter>",
    ),
    "minimax_m2": FormatCase(
        '<invoke name="NAME">\nARGUMENTS</invoke>',
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
        argument='<parameter name="KEY">VALUE</parameter>\n',
        value_end="</parameter>",
    ),
    "glm45": FormatCase(
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        between="\n",
        argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        value_end="</arg_value>",
        several=True,
        answer=f"\n{GLM_OSLO}\n{GLM_BONN}",
    ),
    "pythonic": FormatCase(
        "NAME(ARGUMENTS)",
        "[",
        ", ",
        "]",
        argument=PYTHON_ARGUMENT,
        several=True,
        answer="<|python_start|>[weather(city='Oslo'), weather(city=\"Bonn\", days=3)]"
        "<|python_end|>",
    ),
    "lfm2": FormatCase(
        "NAME(ARGUMENTS)",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
        argument=PYTHON_ARGUMENT,
        several=True,
        template="<|tool_call_start|>[f()]<|tool_call_end|>",
    ),
    "olmo3": FormatCase(
        "NAME(ARGUMENTS)",
        "<function_calls>",
        "\n",
        "</function_calls>",
        argument=PYTHON_ARGUMENT,
        several=True,
        template="<function_calls>\nf(a=1)\n</function_calls>",
        answer="\n<function_calls>\nweather(city='Oslo')\nweather(city='Bonn', days=3)\n"
        "</function_calls>",
    ),
}
NAMES = tuple(FORMAT_CASES)
PYTHON = [name for name, case in FORMAT_CASES.items() if case.argument == PYTHON_ARGUMENT]
BETWEEN_DELIMITERS = [name for name, case in FORMAT_CASES.items() if case.value_end]
SEVERAL = {name for name, case in FORMAT_CASES.items() if case.several}


def format_name(case: str) -> str:
    """The name of a case's format."""
    return case.removeprefix("old ")


def section(name: str, *calls: str) -> str:
    """These calls as a whole answer."""
    case = FORMAT_CASES[name]
    return case.begin + case.between.join(calls) + case.end


def call(
    name: str, function: str, arguments: str, python: Callable[[Any], str] = json.dumps
) -> str:
    """One call as a whole answer. arguments: a JSON object; python: how that style spells values"""
    return section(name, one_call(name, function, arguments, python))


def one_call(
    name: str, function: str, arguments: str, python: Callable[[Any], str] = json.dumps
) -> str:
    """One call without what begins and ends a section."""
    case = FORMAT_CASES[name]
    if case.argument:
        values = json.loads(arguments).items()
        if case.argument == PYTHON_ARGUMENT:
            arguments = ", ".join([f"{key}={python(value)}" for key, value in values])
        else:
            arguments = "".join([_argument(case.argument, *item) for item in values])
    return case.call.replace("NAME", function).replace("ARGUMENTS", arguments)


def _argument(written: str, key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    says = "true" if isinstance(value, str) else "false"
    return written.replace("IS_TEXT", says).replace("KEY", key).replace("VALUE", text)
