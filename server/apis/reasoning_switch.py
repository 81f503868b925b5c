"""Switching a model's thinking on and off, as far as its chat template can."""

from __future__ import annotations

from typing import Any

from server.errors import FieldPath, UnsupportedParameter
from server.prompt.template_messages import SWITCH, effort_levels
from server.prompt.tokenizer import ChatTokenizer

LEVEL = "reasoning_effort"
MARK = "<think>"  # in the template of a model that always thinks


def can_think(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template shows that the model was trained to think before it answers."""
    template = tokenizer.template
    return template is not None and any(map(template.mentions, (SWITCH, LEVEL, MARK)))


def thinking_fields(
    tokenizer: ChatTokenizer, requested: bool | str, param: FieldPath
) -> dict[str, Any]:
    """The fields of a ChatRequest for thinking on, off or at a level ("low", ...).

    param: the caller's field for it.  Raises UnsupportedParameter if the template cannot do it.
    """
    template = tokenizer.template
    has_levels = template is not None and template.mentions(LEVEL)
    if isinstance(requested, str):
        if has_levels:
            return {LEVEL: requested}
        raise UnsupportedParameter(
            "{} is {}: this model's chat template knows no degrees of thinking; use true or false",
            (param, requested),
        )
    if template is not None and template.mentions(SWITCH):
        return {"chat_template_kwargs": {SWITCH: requested}}
    if requested == can_think(tokenizer):
        return {}
    if template is not None and has_levels and not effort_levels(template):
        return {LEVEL: "none"}
    state = "on" if requested else "off"
    raise UnsupportedParameter(
        "{}: this model's chat template cannot switch thinking {}: leave it out", (param, state)
    )
