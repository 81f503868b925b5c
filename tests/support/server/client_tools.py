"""Prompts of the clients' tests, the function that the model calls, and its answers."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from tests.support.server.tiny_chat_tools import (
    ANNA,
    MODEL,
    PERSON,
    RESULT,
    TEXT,
    TOOL_ANSWER,
    WEATHER,
)

__all__ = [
    "ANNA",
    "FRANCE",
    "FUNCTION",
    "MODEL",
    "PERSON",
    "RESULT",
    "TEXT",
    "TOOL_ANSWER",
    "WEATHER",
]
FRANCE = "What is the capital of France?"


class Person(BaseModel):
    """The form of what TEXT says."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": SCHEMA,
}


def weather(arguments: str | dict[str, Any]) -> str:
    """Carry a call out.  Fails unless it is the one that WEATHER asks for."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert value == {"city": "Paris"}
    return RESULT


def is_anna(found: object) -> bool:
    return found == Person.model_validate(ANNA)
