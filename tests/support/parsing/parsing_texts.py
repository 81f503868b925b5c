# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines
"""Answers as models of each format write them, and what they hold."""

from __future__ import annotations

from typing import NamedTuple

from tests.support.parsing.parsed_answer import Split

OSLO = ("weather", '{"city": "Oslo"}')
BONN = ("weather", '{"city": "Bonn", "days": 3}')
NOW = ("now", "{}")


class ParsingCase(NamedTuple):
    name: str
    tools: str | None
    reasoning: str | None
    text: str
    split: Split
    within: bool = False


HERMES_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_BONN = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>'
)
DSML_BONN = (
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
KIMI_OSLO = (
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|>'
)
KIMI_BONN = (
    "<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>"
    '{"city": "Bonn", "days": 3}<|tool_call_end|>'
)
KIMI = f"<|tool_calls_section_begin|>{KIMI_OSLO}{KIMI_BONN}<|tool_calls_section_end|>"
CODER_OSLO = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>"
)
CODER_BONN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM_OSLO = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
GLM_BONN = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
HARMONY_CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
