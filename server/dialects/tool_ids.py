"""Ids of calls as Anthropic writes them, and back.

    call_4bZ...                toolu_4bZ...
    Ab3dE6gH9                  toolu_Ab3dE6gH9              models of Mistral's
    functions.get_weather:0    toolu_functions-get_weather-0    models of Kimi's

The chat templates of the last two print ids or check their form, so they see what the model knows.
Other ids, those of Anthropic's own answers too, stay as they are.
"""

from __future__ import annotations

import re

PREFIX = "toolu_"
KIMI = re.compile(r"functions\.(.+):(\d+)")
OWN = re.compile(rf"{PREFIX}(?:functions-(.+)-(\d+)|([a-zA-Z0-9]{{9}}))")


def anthropic_id(id: str) -> str:
    """The id of a call that the model made, for the caller."""
    kimi = KIMI.fullmatch(id)
    plain = id.removeprefix("call_") if kimi is None else f"functions-{kimi[1]}-{kimi[2]}"
    return PREFIX + plain


def model_id(id: str) -> str:
    """The id of a call that the caller sends back, for the chat template."""
    found = OWN.fullmatch(id)
    if found is None:
        return id
    return found[3] or f"functions.{found[1]}:{found[2]}"
