"""The arguments of a tool call, which a model writes as text, as the object they should be."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic_core import from_json, to_json

from server.schema.base import fields_of


def tool_input(arguments: str) -> dict[str, Any]:
    """Arguments that `max_tokens` cut off give what can be read of them; {} if nothing can."""
    try:
        return fields_of(from_json(arguments, allow_partial="trailing-strings"))
    except ValueError:
        return {}


def input_json(arguments: str) -> orjson.Fragment:
    """The same as a part of an answer; numbers that 64 bits do not hold keep all their digits."""
    return orjson.Fragment(to_json(tool_input(arguments), inf_nan_mode="null"))
