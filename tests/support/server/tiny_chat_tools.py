"""What the built-in model is asked in tests of calls, reasoning and JSON, and what it must say."""

from __future__ import annotations

from typing import Any

MODEL = "tiny-chat"


def parameters(**types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


def function(name: str, **types: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters(**types)}}


TOOLS: Any = [
    function("get_weather", city="string"),
    function("set_timer", minutes="integer"),
    function("send_email", to="string", body="string"),
]
WEATHER = "What is the weather in Paris?"
TWO_CITIES = "What is the weather in Paris and in Rome?"
RESULT = '{"temperature": 21, "condition": "sunny"}'
TOOL_ANSWER = "I got this: temperature 21, condition sunny."
NO_TOOL_NEEDED = ("What is the capital of Norway?", "The capital of Norway is Oslo.")
NONE_FITS = ("Play the song Rainbow.", "I have no tool for that.")
HARD, HARD_THOUGHT, HARD_ANSWER = (
    "What is 17 + 25 - 8?",
    "17 + 25 = 42\n42 - 8 = 34",
    "The answer is 34.",
)
TEXT = "Extract name, age and city as JSON from Anna is 31 years old and lives in Oslo."
PERSON = {
    **parameters(name="string", age="integer", city="string"),
    "additionalProperties": False,
}
ANNA = {"name": "Anna", "age": 31, "city": "Oslo"}
