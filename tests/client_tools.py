"""What the clients' tests ask, and the function that the model calls in them."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "tiny-chat"
FRANCE = "What is the capital of France?"
CITIES = ("Rome", "Paris", "Oslo")
City = Literal["Rome", "Paris", "Oslo"]


class Place(BaseModel):
    """A form that answers are to have."""

    model_config = ConfigDict(extra="forbid")
    city: City
    days: Literal[1, 2, 3]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": SCHEMA,
}


def weather(arguments: str | dict[str, Any]) -> str:
    """Carry a call out.  Fails unless its arguments are those that the schema allows."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    place = Place.model_validate(value)
    return f"sunny in {place.city} for {place.days} days"
