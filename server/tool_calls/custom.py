"""Calls of custom tools, which a model writes as calls of a function with one text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from server.apis.openai.tools_schema import INPUT
from server.http.validation import fields_of
from server.tool_calls.parser.deltas import Delta, ToolCallDelta


def tool_input(arguments: str) -> dict[str, Any]:
    """Arguments that `max_tokens` cut off give what can be read of them; {} if nothing can."""
    try:
        return fields_of(from_json(arguments, allow_partial="trailing-strings"))
    except ValueError:
        return {}


def input_json(arguments: str) -> orjson.Fragment:
    """The input of a call as part of an answer; integers beyond 64 bits keep all their digits."""
    return orjson.Fragment(to_json(tool_input(arguments), inf_nan_mode="null"))


class CustomCalls:
    """Follows the deltas of one answer: calls of these tools come whole, with their input."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._begun: ToolCallDelta | None = None
        self._arguments: list[str] = []

    def converted(self, deltas: Sequence[Delta], *, last: bool) -> list[Delta]:
        """The deltas without those of an unfinished custom call; `last`: nothing follows."""
        if not self._names:
            return list(deltas)
        found: list[Delta] = []
        for delta in deltas:
            if self._begun is not None and isinstance(delta, ToolCallDelta) and delta.id is None:
                self._arguments.append(delta.arguments)
                continue
            found += self._ended()
            if isinstance(delta, ToolCallDelta) and delta.name in self._names:
                self._begun = delta
                self._arguments = [delta.arguments]
            else:
                found.append(delta)
        return found + self._ended() if last else found

    def _ended(self) -> list[Delta]:
        call, self._begun = self._begun, None
        if call is None:
            return []
        text = input_of("".join(self._arguments))
        return [ToolCallDelta(call.index, text, call.id, call.name, custom=True)]


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with; all that was written where it is not the one."""
    found = tool_input(arguments).get(INPUT)
    return found if isinstance(found, str) else arguments
