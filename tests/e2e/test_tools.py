"""Calls that a grammar enforces, of a real model that is not shown the tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.server.server_process import Server

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "<|im_end|>\n{% endfor %}{% if tools %}{# not shown: <tool_call> #}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CITIES = ["Rome", "Paris", "Oslo"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": CITIES},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}
ASK: dict[str, Any] = {
    "model": "tiny-chat",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "tools": [WEATHER, NOW],
    "max_tokens": 400,  # this model likes white space in JSON
}


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "now":
        assert value == {}
    else:
        assert name == "weather" and set(value) == {"city", "days"}
        assert value["city"] in CITIES and value["days"] in range(1, 10)


def test_calls_that_must_be_made_are_made_and_right(
    own_server: Callable[..., Server], tmp_path: Path
):
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    server = own_server("--chat-template", str(template))
    create: Any = server.client().chat.completions.create
    for seed in range(2):
        answer = create(
            **ASK, tool_choice="required", temperature=1.0, seed=seed, parallel_tool_calls=False
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls or []
        check(call.function.name, call.function.arguments)

    named = {"type": "function", "function": {"name": "weather"}}
    parts: list[str] = []
    finish = None
    for chunk in create(**ASK, tool_choice=named, parallel_tool_calls=False, seed=0, stream=True):
        [streamed] = chunk.choices
        assert not streamed.delta.content
        parts += [call.function.arguments for call in streamed.delta.tool_calls or ()]
        finish = streamed.finish_reason or finish
    assert finish == "tool_calls"
    check("weather", "".join(parts))

    free = create(**ASK, temperature=0)
    assert "Paris" in (free.choices[0].message.content or "")
    assert free.choices[0].message.tool_calls is None
