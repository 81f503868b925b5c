"""What a request gives the chat template besides the messages."""

from __future__ import annotations

from typing import Any

from server.apis.openai.chat_schema import ChatRequest
from server.errors import RequestError, UnsupportedParameter
from server.prompt.chat_template import ChatTemplate
from server.prompt.tokenizer import ChatTokenizer

# Values that ask a model which cannot choose for what it does anyway.
HARMLESS = {"reasoning_effort": ("none", "medium"), "verbosity": ("medium",)}
SWITCH = "enable_thinking"  # of templates that switch reasoning on or off, without levels


def template_options(body: ChatRequest, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Variables for the template.  Raises RequestError for what this template does not know."""
    options = dict(body.chat_template_kwargs or {})
    template = tokenizer.template
    if template is None:
        return options
    for name in HARMLESS:
        value: str | None = getattr(body, name)
        if value is None:
            continue
        variables = _variable(name, value, template)
        for twice in {name, *variables}.intersection(options):
            raise RequestError(
                f"`chat_template_kwargs.{twice}` says what `{name}` says: leave one of them out",
                param=name,
            )
        options |= variables
    for key, said in options.items():
        # null and false have no effect where the template does not read them.
        if said is not None and said is not False and not template.mentions(key):
            raise UnsupportedParameter(
                f"`chat_template_kwargs.{key}` is nothing that this model's chat template knows: "
                "leave it out",
                param=f"chat_template_kwargs.{key}",
            )
    return options


def _variable(name: str, value: str, template: ChatTemplate) -> dict[str, Any]:
    if template.mentions(name):
        return {name: value}
    if name == "reasoning_effort" and value == "none" and template.mentions(SWITCH):
        return {SWITCH: False}
    if value in HARMLESS[name]:
        return {}
    shown = " or ".join(HARMLESS[name])
    raise UnsupportedParameter(
        f"`{name}` is {value}: this model's chat template has no place for it; use {shown}, or "
        "leave it out",
        param=name,
    )
