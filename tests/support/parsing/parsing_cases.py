# ruff: noqa: RUF001 -- DeepSeek's delimiters have wide vertical lines
"""Answers with calls, and what they are split into; CASES are all there are."""

from __future__ import annotations

from tests.support.parsing.format_cases import FORMAT_CASES, format_name, one_call, section
from tests.support.parsing.parsed_answer import Split
from tests.support.parsing.parsing_edge_cases import BROKEN, REASONING, WITHOUT_ARGUMENTS
from tests.support.parsing.parsing_texts import (
    BONN,
    CODER_BONN,
    CODER_OSLO,
    DSML_BONN,
    HARMONY_CALL,
    HERMES_BONN,
    HERMES_OSLO,
    KIMI_BONN,
    KIMI_OSLO,
    NOW,
    OSLO,
    ParsingCase,
)

# Two calls, with words before them.
CALLS = [
    ParsingCase(
        name,
        format_name(name),
        None,
        "Let me see."
        + (case.answer or section(name, *[one_call(name, *each) for each in (OSLO, BONN)])),
        Split("Let me see.", "", (OSLO, BONN)),
    )
    for name, case in FORMAT_CASES.items()
    if name != "harmony"  # where no text stands before a message
]

# Without words before, and with words after.
ALONE = [
    ParsingCase(
        f"{case.name}, alone",
        case.tools,
        None,
        case.text.removeprefix("Let me see.") + "\n\nWell.",
        Split("Well.", "", (OSLO, BONN)),
    )
    for case in CALLS
]

VARIANTS = [
    ParsingCase("no tools", None, None, HERMES_OSLO, Split(HERMES_OSLO)),
    ParsingCase("words only", "hermes", "think", "  Hi <b>you</b>\n", Split("  Hi <b>you</b>\n")),
    ParsingCase(
        "content between calls",
        "hermes",
        None,
        f"one \n{HERMES_OSLO}\n two \n\n{HERMES_BONN}\n",
        Split("one\ntwo", "", (OSLO, BONN)),
    ),
    ParsingCase(
        "name after the arguments",
        "hermes",
        None,
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        Split("", "", (OSLO,)),
    ),
    ParsingCase(
        "arguments in a string",
        "hermes",
        None,
        r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>',
        Split("", "", (OSLO,)),
    ),
    ParsingCase(
        "no arguments, or null",
        "hermes",
        None,
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        "</tool_call>",
        Split("", "", (NOW, NOW)),
    ),
    ParsingCase(
        "a brace too many and one too few",
        "hermes",
        None,
        HERMES_OSLO.replace("}}", "}}}") + HERMES_BONN.replace("}}", "}"),
        Split("", "", (OSLO, BONN)),
    ),
    ParsingCase(
        "delimiters inside arguments",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><tool_call>"}}'
        "</tool_call>",
        Split("", "", (("weather", '{"city": "</tool_call><tool_call>"}'),)),
    ),
    ParsingCase(
        "white space of the model's JSON",
        "hermes",
        None,
        '<tool_call>{"name":"weather","arguments":{ "city" :"Oslo" ,\n "hours": [ 1,2 , [ ] ] }}'
        "</tool_call>",
        Split("", "", (("weather", '{ "city" :"Oslo" ,\n "hours": [ 1,2 , [ ] ] }'),)),
    ),
    ParsingCase(
        "Python where JSON was asked for",
        "hermes",
        None,
        "<tool_call>{'name': 'weather', 'arguments': {'exact': True, 'note': None, }}</tool_call>",
        Split("", "", (("weather", "{'exact': true, 'note': null }".replace("'", '"')),)),
    ),
    ParsingCase(
        "line ends and lone backslashes in strings",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d\\u00e9\\x41\\\\"}}'
        "</tool_call>",
        Split("", "", (("weather", '{"city": "a\\nb\\\\d\\u00e9A\\\\"}'),)),
    ),
    ParsingCase(
        "bare Llama call",
        "llama3_json",
        None,
        '\n{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
        Split("", "", (OSLO,)),
    ),
    ParsingCase(
        "JSON that is no call",
        "llama3_json",
        None,
        '{"name": "Jane", "parameters": {"age": 5}}',
        Split('{"name": "Jane", "parameters": {"age": 5}}'),
    ),
    ParsingCase(
        "JSON with keys of its own",
        "llama3_json",
        None,
        '{"name": "weather", "height": 5}',
        Split('{"name": "weather", "height": 5}'),
    ),
    ParsingCase(
        "a built-in tool of Llama",
        "llama3_json",
        None,
        '<|python_tag|>brave_search.call(query="x")',
        Split('<|python_tag|>brave_search.call(query="x")'),
    ),
    ParsingCase(
        "bare pythonic call",
        "pythonic",
        None,
        "[now(), weather(city='It\\'s \"Oslo\"', options={'a': (1, -2.5), 'b': [True, None]},)]",
        Split(
            "",
            "",
            (
                NOW,
                (
                    "weather",
                    '{"city": "It\'s \\"Oslo\\"", "options": {"a": [1, -2.5], "b": [true, null]}}',
                ),
            ),
        ),
    ),
    ParsingCase(
        "a list that is no call",
        "pythonic",
        None,
        "[weather](https://example.org) or [other(a=1)]",
        Split("[weather](https://example.org) or [other(a=1)]"),
    ),
    ParsingCase(
        "kimi without the section's delimiter",
        "kimi_k2",
        None,
        f"ok {KIMI_OSLO} {KIMI_BONN}",
        Split("ok", "", (OSLO, BONN)),
    ),
    ParsingCase(
        "Qwen coder without the section's delimiter",
        "qwen3_coder",
        None,
        "ok\n" + CODER_OSLO.removeprefix("<tool_call>\n") + "\n" + CODER_BONN,
        Split("ok", "", (OSLO, BONN)),
    ),
    ParsingCase(
        "calls without arguments between delimiters",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=now>\n</function>\n</tool_call><tool_call><function=now>"
        "</tool_call>",
        Split("", "", (NOW, NOW)),
    ),
    ParsingCase(
        "types by the schema",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n4.0\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=wind>\n.5\n</parameter>\n<parameter=options>\n{'a': [1]}\n</parameter>\n"
        "<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        "<parameter=other>\nsome words\n</parameter>\n</function>\n</tool_call>",
        Split(
            "",
            "",
            (
                (
                    "weather",
                    '{"city": "12", "days": 4, "exact": true, "wind": 0.5, "options": {"a": [1]}, '
                    '"hours": [1, 2], "note": null, "other": "some words"}',
                ),
            ),
        ),
    ),
    ParsingCase(
        "text of several lines as an argument",
        "qwen3_coder",
        None,
        '<tool_call>\n<function=weather>\n<parameter=city>\n\n  if a < b:\n\t"ü"\n\n'
        "</parameter>\n</function>\n</tool_call>",
        Split("", "", (("weather", '{"city": "\\n  if a < b:\\n\\t\\"ü\\"\\n"}'),)),
    ),
    ParsingCase(
        "a delimiter that says what is a string",
        "deepseek_v32",
        None,
        f"<｜DSML｜function_calls>{DSML_BONN.replace('false', 'true')}</｜DSML｜function_calls>",
        Split("", "", (("weather", '{"city": "Bonn", "days": "3"}'),)),
    ),
    ParsingCase(
        "glm without arguments",
        "glm45",
        None,
        "<tool_call>now\n</tool_call>",
        Split("", "", (NOW,)),
    ),
    ParsingCase(
        "harmony",
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>Let me see.<|end|><|start|>assistant{HARMONY_CALL}",
        Split("Let me see.", "Think.", (OSLO,)),
    ),
    ParsingCase(
        "harmony, recipient before the channel",
        "harmony",
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        Split("", "", (OSLO,)),
    ),
    ParsingCase(
        "harmony, two messages of reasoning and an answer",
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n",
        Split("Yes.\n", "a\nb"),
    ),
    ParsingCase(
        "harmony without tools",
        None,
        "harmony",
        HARMONY_CALL,
        Split('{"city": "Oslo"}'),
    ),
    ParsingCase(
        "harmony whose reasoning is content",
        "harmony",
        None,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        Split("a\nb"),
    ),
    ParsingCase("harmony without heads", "harmony", "harmony", "Hello <b>", Split("Hello <b>")),
    ParsingCase(
        "harmony, within the analysis",
        "harmony",
        "harmony",
        "a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        Split("b", "a"),
        within=True,
    ),
]

CASES = CALLS + ALONE + VARIANTS + REASONING + WITHOUT_ARGUMENTS + BROKEN
