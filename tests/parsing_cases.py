# ruff: noqa: RUF001 -- DeepSeek's marks have wide vertical lines
"""Answers as models of each format write them, and what they hold."""

from __future__ import annotations

from typing import NamedTuple

from parsed import Split

OSLO = ("weather", '{"city": "Oslo"}')
BONN = ("weather", '{"city": "Bonn", "days": 3}')
NOW = ("now", "{}")


class Case(NamedTuple):
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
DEEP_OSLO = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'
)
DEEP_BONN = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Bonn", "days": 3}\n```<｜tool▁call▁end｜>'
)
DSML_OSLO = (
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>'
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

# Two calls, with words before them.
CALLS = [
    Case(name, name, None, f"Let me see.{text}", Split("Let me see.", "", (OSLO, BONN)))
    for name, text in (
        ("hermes", f"\n{HERMES_OSLO}\n{HERMES_BONN}"),
        (
            "granite",
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}, '
            '{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}]',
        ),
        (
            "nemotron_json",
            '\n\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}, '
            '{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}]</TOOLCALL>',
        ),
        (
            "llama3_json",
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; '
            '{"name": "weather", "parameters": {"city": "Bonn", "days": 3}}',
        ),
        (
            "pythonic",
            "<|python_start|>[weather(city='Oslo'), weather(city=\"Bonn\", days=3)]<|python_end|>",
        ),
        (
            "lfm2",
            "<|tool_call_start|>[weather(city='Oslo'), weather(city=\"Bonn\", days=3)]"
            "<|tool_call_end|>",
        ),
        (
            "olmo3",
            "\n<function_calls>\nweather(city='Oslo')\nweather(city='Bonn', days=3)\n"
            "</function_calls>",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, '
            '{"name": "weather", "arguments": {"city": "Bonn", "days": 3}, "id": "a1b2c3d4e"}]',
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
            '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Bonn", "days": 3}',
        ),
        (
            "deepseek_v3",
            f"\n\n<｜tool▁calls▁begin｜>{DEEP_OSLO}\n{DEEP_BONN}<｜tool▁calls▁end｜>",
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
            '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>'
            '{"city": "Bonn", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek_v32",
            f"\n\n<｜DSML｜function_calls>\n{DSML_OSLO}\n{DSML_BONN}\n</｜DSML｜function_calls>",
        ),
        ("kimi_k2", KIMI),
        ("qwen3_coder", f"\n{CODER_OSLO}\n{CODER_BONN}"),
        (
            "seed_oss",
            "\n<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
            "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=weather>\n"
            "<parameter=city>Bonn</parameter>\n<parameter=days>3</parameter>\n"
            "</function>\n</seed:tool_call>",
        ),
        (
            "minimax_m2",
            '\n<minimax:tool_call>\n<invoke name="weather">\n'
            '<parameter name="city">Oslo</parameter>\n</invoke>\n<invoke name="weather">\n'
            '<parameter name="city">Bonn</parameter>\n<parameter name="days">3</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
        ),
        ("glm45", f"\n{GLM_OSLO}\n{GLM_BONN}"),
    )
]

# The same without words before, and with words after.
ALONE = [
    Case(
        f"{case.name}, alone",
        case.tools,
        None,
        case.text.removeprefix("Let me see.") + "\n\nWell.",
        Split("Well.", "", (OSLO, BONN)),
    )
    for case in CALLS
]

VARIANTS = [
    Case("no tools", None, None, HERMES_OSLO, Split(HERMES_OSLO)),
    Case("words only", "hermes", "think", "  Hi <b>you</b>\n", Split("  Hi <b>you</b>\n")),
    Case(
        "content between calls",
        "hermes",
        None,
        f"one \n{HERMES_OSLO}\n two \n\n{HERMES_BONN}\n",
        Split("one\ntwo", "", (OSLO, BONN)),
    ),
    Case(
        "name after the arguments",
        "hermes",
        None,
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        Split("", "", (OSLO,)),
    ),
    Case(
        "arguments in a string",
        "hermes",
        None,
        r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>',
        Split("", "", (OSLO,)),
    ),
    Case(
        "no arguments, or null",
        "hermes",
        None,
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        "</tool_call>",
        Split("", "", (NOW, NOW)),
    ),
    Case(
        "a brace too many and one too few",
        "hermes",
        None,
        HERMES_OSLO.replace("}}", "}}}") + HERMES_BONN.replace("}}", "}"),
        Split("", "", (OSLO, BONN)),
    ),
    Case(
        "marks inside arguments",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><tool_call>"}}'
        "</tool_call>",
        Split("", "", (("weather", '{"city": "</tool_call><tool_call>"}'),)),
    ),
    Case(
        "white space of the model's JSON",
        "hermes",
        None,
        '<tool_call>{"name":"weather","arguments":{ "city" :"Oslo" ,\n "hours": [ 1,2 , [ ] ] }}'
        "</tool_call>",
        Split("", "", (("weather", '{ "city" :"Oslo" ,\n "hours": [ 1,2 , [ ] ] }'),)),
    ),
    Case(
        "Python where JSON was asked for",
        "hermes",
        None,
        "<tool_call>{'name': 'weather', 'arguments': {'exact': True, 'note': None, }}</tool_call>",
        Split("", "", (("weather", "{'exact': true, 'note': null }".replace("'", '"')),)),
    ),
    Case(
        "line ends and lone backslashes in strings",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d\\u00e9\\x41\\\\"}}'
        "</tool_call>",
        Split("", "", (("weather", '{"city": "a\\nb\\\\d\\u00e9A\\\\"}'),)),
    ),
    Case(
        "bare Llama call",
        "llama3_json",
        None,
        '\n{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
        Split("", "", (OSLO,)),
    ),
    Case(
        "JSON that is no call",
        "llama3_json",
        None,
        '{"name": "Jane", "parameters": {"age": 5}}',
        Split('{"name": "Jane", "parameters": {"age": 5}}'),
    ),
    Case(
        "JSON with keys of its own",
        "llama3_json",
        None,
        '{"name": "weather", "height": 5}',
        Split('{"name": "weather", "height": 5}'),
    ),
    Case(
        "a built-in tool of Llama",
        "llama3_json",
        None,
        '<|python_tag|>brave_search.call(query="x")',
        Split('<|python_tag|>brave_search.call(query="x")'),
    ),
    Case(
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
    Case(
        "a list that is no call",
        "pythonic",
        None,
        "[weather](https://example.org) or [other(a=1)]",
        Split("[weather](https://example.org) or [other(a=1)]"),
    ),
    Case(
        "kimi without the section's mark",
        "kimi_k2",
        None,
        f"ok {KIMI_OSLO} {KIMI_BONN}",
        Split("ok", "", (OSLO, BONN)),
    ),
    Case(
        "Qwen coder without the section's mark",
        "qwen3_coder",
        None,
        "ok\n" + CODER_OSLO.removeprefix("<tool_call>\n") + "\n" + CODER_BONN,
        Split("ok", "", (OSLO, BONN)),
    ),
    Case(
        "calls without arguments between marks",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=now>\n</function>\n</tool_call><tool_call><function=now>"
        "</tool_call>",
        Split("", "", (NOW, NOW)),
    ),
    Case(
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
    Case(
        "text of several lines as an argument",
        "qwen3_coder",
        None,
        '<tool_call>\n<function=weather>\n<parameter=city>\n\n  if a < b:\n\t"ü"\n\n'
        "</parameter>\n</function>\n</tool_call>",
        Split("", "", (("weather", '{"city": "\\n  if a < b:\\n\\t\\"ü\\"\\n"}'),)),
    ),
    Case(
        "a mark that says what is a string",
        "deepseek_v32",
        None,
        f"<｜DSML｜function_calls>{DSML_BONN.replace('false', 'true')}</｜DSML｜function_calls>",
        Split("", "", (("weather", '{"city": "Bonn", "days": "3"}'),)),
    ),
    Case(
        "glm without arguments",
        "glm45",
        None,
        "<tool_call>now\n</tool_call>",
        Split("", "", (NOW,)),
    ),
    Case(
        "harmony",
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>Let me see.<|end|><|start|>assistant{HARMONY_CALL}",
        Split("Let me see.", "Think.", (OSLO,)),
    ),
    Case(
        "harmony, recipient before the channel",
        "harmony",
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        Split("", "", (OSLO,)),
    ),
    Case(
        "harmony, two thoughts and an answer",
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n",
        Split("Yes.\n", "a\nb"),
    ),
    Case(
        "harmony without tools",
        None,
        "harmony",
        HARMONY_CALL,
        Split('{"city": "Oslo"}'),
    ),
    Case(
        "harmony whose reasoning is not told apart",
        "harmony",
        None,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        Split("a\nb"),
    ),
    Case("harmony without heads", "harmony", "harmony", "Hello <b>", Split("Hello <b>")),
    Case(
        "harmony, within the analysis",
        "harmony",
        "harmony",
        "a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        Split("b", "a"),
        within=True,
    ),
]

REASONING = [
    Case("think", None, "think", "<think>\nhm\n</think>\n\nYes.", Split("Yes.", "hm")),
    Case("opened by the prompt", None, "think", "hm\n</think>\n\nYes.", Split("Yes.", "hm"), True),
    Case("opened twice", None, "think", "\n<think>hm</think>Yes.", Split("Yes.", "hm"), True),
    Case("empty", None, "think", "<think>\n\n</think>\n\nYes.", Split("Yes.")),
    Case("never ends", None, "think", "<think>hm, \n", Split("", "hm, \n")),
    Case("later in the answer", None, "think", "The <think> tag", Split("The <think> tag")),
    Case(
        "then calls",
        "hermes",
        "think",
        f"<think>\nMaybe {HERMES_OSLO}?\n</think>\n\n{HERMES_BONN}",
        Split("", f"Maybe {HERMES_OSLO}?", (BONN,)),
    ),
    Case("glm45", "glm45", "think", f"\n<think>hm</think>\n{GLM_OSLO}", Split("", "hm", (OSLO,))),
    Case("kimi", "kimi_k2", "kimi_k2", f"hm {KIMI}", Split("", "hm", (OSLO, BONN)), True),
    Case("seed", None, "seed_oss", "<seed:think>hm</seed:think>Yes.", Split("Yes.", "hm")),
    Case("mistral", "mistral", "mistral", "[THINK]hm[/THINK]Yes.", Split("Yes.", "hm")),
    Case(
        "granite",
        None,
        "granite",
        "Here is my thought process: hm.\nHere is my response: Yes.",
        Split("Yes.", "hm."),
    ),
    Case(
        "then a call without a mark",
        "llama3_json",
        "think",
        '<think>hm</think>{"name": "weather", "parameters": {"city": "Oslo"}}',
        Split("", "hm", (OSLO,)),
    ),
]

# What only looks like a call, or ends too early.
BROKEN = [
    Case(f"broken: {text}"[:60], tools, None, text, Split(content, "", calls))
    for tools, text, content, calls in (
        ("hermes", "a\n<tool_call> b", "a\n<tool_call> b", ()),
        ("hermes", "a <tool_call>", "a <tool_call>", ()),
        ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", ()),
        ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', ()),
        ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', ()),
        ("hermes", f"<tool_call>x{HERMES_OSLO}", "<tool_call>x", (OSLO,)),
        ("hermes", f"<tool_call>\n{HERMES_OSLO}", "<tool_call>", (OSLO,)),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "Os',
            "",
            (("weather", '{"city": "Os'),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"exact": tr',
            "",
            (("weather", '{"exact": tr'),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": ?}}</tool_call>',
            "?}}</tool_call>",
            (("weather", '{"city": '),),
        ),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", ()),
        ("mistral", "[TOOL_CALLS]weather please", "[TOOL_CALLS]weather please", ()),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=days>\n1",
            "",
            (("weather", '{"days": 1'),),
        ),
        ("qwen3_coder", "<tool_call>\n<function=we", "<tool_call>\n<function=we", ()),
        ("glm45", "<tool_call>hello you</tool_call>", "<tool_call>hello you</tool_call>", ()),
        ("pythonic", "[weather(city", "[weather(city", ()),
        ("pythonic", "[weather(city=Oslo)]", "Oslo)]", (("weather", '{"city": '),)),
        ("harmony", "<|channel|>ana", "<|channel|>ana", ()),
        (
            "harmony",
            f"{HARMONY_CALL}<|start|>assistant<|chan",
            "<|start|>assistant<|chan",
            (OSLO,),
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.now<|message|>{"a": ?}<|end|><|start|>assis',
            "?}<|end|><|start|>assis",
            (("now", '{"a": '),),
        ),
        (
            "llama3_json",
            '{"name": "weather", "parameters": 5}',
            '{"name": "weather", "parameters": 5}',
            (),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}, "x',
            "",
            (OSLO,),
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": ?} <tool_call>{"na',
            '?} <tool_call>{"na',
            (("weather", '{"city": '),),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</func",
            "",
            (("weather", '{"city": "Oslo"'),),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=></function></tool_call>",
            "<tool_call><function=></function></tool_call>",
            (),
        ),
    )
]

CASES = CALLS + ALONE + VARIANTS + REASONING + BROKEN
