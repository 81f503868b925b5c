"""Messages, tools and options of a request as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from server.apis.openai.chat_schema import ChatRequest, ImagePart, Message, ToolCall
from server.apis.openai.tools_schema import Tool
from server.errors import FieldPath, MissingParameter, RequestError, UnsupportedParameter
from server.prompt.chat_template import ChatTemplate
from server.prompt.tokenizer import ChatTokenizer
from server.tool_calls.formats import detect

EFFORT = "reasoning_effort"
# Values taken from templates without such a variable: their models answer like that anyway.
HARMLESS = {EFFORT: ("none", "medium"), "verbosity": ("medium",)}
BUILTIN = "builtin_tools"  # of gpt-oss's template: tools that a server would have to run
SWITCH = "enable_thinking"  # of templates that switch reasoning on or off, without levels


def check_messages(messages: Sequence[Message]) -> None:
    """What each role must and must not bring.  Raises RequestError with the field's path."""
    for index, message in enumerate(messages):
        _check_message(message, FieldPath("messages", index))


def _check_message(message: Message, path: FieldPath) -> None:
    role = message.role
    if role != "assistant" and message.reasoning_text():
        name = "reasoning_content" if message.reasoning_content else "reasoning"
        raise _misplaced(path / name, "assistant", role)
    if message.refusal and (role != "assistant" or message.content):
        raise RequestError(
            "{} stands in place of the `content` of role assistant: send one of the two",
            path / "refusal",
        )
    if role == "assistant":
        if message.text() is None and not message.tool_calls:
            raise MissingParameter(
                "{} of role assistant has neither `content` nor `tool_calls`: add one",
                path,
                param=path / "content",
            )
    elif message.content is None:
        raise _missing(path / "content", role)
    elif message.tool_calls:
        raise _misplaced(path / "tool_calls", "assistant", role)
    if role == "tool" and message.tool_call_id is None:
        raise _missing(path / "tool_call_id", role)
    if role != "tool" and message.tool_call_id is not None:
        raise _misplaced(path / "tool_call_id", "tool", role)


def _misplaced(path: FieldPath, owner: str, role: str) -> RequestError:
    return RequestError("{} belongs to role {}, not {}: remove it", (path, owner, role))


def _missing(path: FieldPath, role: str) -> RequestError:
    return MissingParameter("{} is required for role {}: add it", (path, role))


def template_messages(
    messages: Sequence[Message], tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    """Plain dicts with text content.

    Raises RequestError for a role or a field of a message that the template has no place for.
    """
    template = tokenizer.template

    def knows(word: str) -> bool:
        return template is None or template.mentions(word)

    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = message.role
        if role == "developer" and not knows("developer"):
            role = "system"  # OpenAI's newer name for the same thing
        if role == "tool" and not knows("tool"):
            raise RequestError(
                "{} is tool, which this model's chat template has no place for: put the result "
                "into a user message",
                FieldPath("messages", index, "role"),
            )
        entry: dict[str, Any] = {"role": role, "content": _content(message)}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning_text() and template is not None:
            entry |= _reasoning_of(message, template)
        if message.tool_calls:
            path = FieldPath("messages", index, "tool_calls")
            if not knows("tool_calls"):
                raise RequestError(
                    "{}: this model's chat template has no place for tool calls: put them into "
                    "the content",
                    path,
                )
            entry["tool_calls"] = [
                _tool_call(call, path / place) for place, call in enumerate(message.tool_calls)
            ]
        plain.append(entry)
    return tokenizer.call_traits.fitted(plain)


def _content(message: Message) -> str | list[dict[str, str]] | None:
    """Text, or parts where there are images, for which the template prints placeholders."""
    content = message.content
    if content is None or isinstance(content, str) or not message.images():
        return message.text()
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in content
    ]


def content_chars(message: Mapping[str, Any]) -> int:
    """Characters of a message's content, as `template_messages` returns it."""
    content: str | list[dict[str, str]] = message["content"] or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def template_tools(tools: Sequence[Tool], tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    """The tools as templates print them.

    Raises UnsupportedParameter if the model's template has no place for them.
    """
    template = tokenizer.template
    if tools and template is not None and not template.mentions("tools"):
        raise UnsupportedParameter(
            "{tools}: this model's chat template has no place for tools, so that it was not "
            "trained to call them: leave {tools} out, or serve a model that calls tools"
        )
    # Without copies of the schemas, which may be large.
    return [
        {
            "type": "function",
            "function": {name: value for name, value in tool.function if value is not None},
        }
        for tool in tools
    ]


def _reasoning_of(message: Message, template: ChatTemplate) -> dict[str, str]:
    """Earlier reasoning under the name that the template has for it.

    The template knows which reasoning the model was trained to read again; most leave out
    those from before the last question, and many leave out all.
    """
    if template.mentions("reasoning_content"):
        return {"reasoning_content": message.reasoning_text()}
    # gpt-oss's template refuses a call with both.
    if template.mentions(".thinking") and not (message.tool_calls and message.text()):
        return {"thinking": message.reasoning_text()}
    return {}


def unseen_chars(messages: Sequence[Message]) -> int:
    """Characters besides the contents, which the template may print or leave out."""
    return sum(
        len(message.reasoning_text())
        + sum(len(call.function.arguments) for call in message.tool_calls or ())
        for message in messages
    )


def _tool_call(call: ToolCall, path: FieldPath) -> dict[str, Any]:
    # Templates print the arguments as JSON themselves, so they get them parsed.
    arguments = _arguments(call.function.arguments or "{}", path / "function" / "arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str, path: FieldPath) -> object:
    """Those of a call; as far as they go, where max_tokens cut them short."""
    try:
        # Unlike orjson it keeps integers that 64 bits do not hold.
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        cut = _cut_object(text)
        if cut is None:
            raise RequestError(
                "{} is not valid JSON: {}; send a JSON object, or as much of one as the model "
                "wrote",
                (path, error),
            ) from None
        return cut


def _cut_object(text: str) -> dict[str, Any] | None:
    """An object of JSON whose end is missing; None for any other text."""
    try:
        found = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:  # which this parser also raises where the other would recurse too deeply
        return None
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:  # nothing ends in it, so that no text was passed over
        return cast("dict[str, Any]", found) if isinstance(found, dict) else None
    return None


def template_options(body: ChatRequest, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Variables for the template.  Raises RequestError for what this template does not know."""
    options = dict(body.chat_template_kwargs or {})
    template = tokenizer.template
    if template is None:
        return options
    _check_switch(body.reasoning_effort, options)
    for name in HARMLESS:
        level: str | None = getattr(body, name)
        if level is None:
            continue
        variables = _variable(name, level, template)
        for twice in {name, *variables}.intersection(options):
            raise RequestError(
                "{} says what {} says: leave one of them out",
                (FieldPath("chat_template_kwargs", twice), FieldPath(name)),
                param=FieldPath(name),
            )
        options |= variables
    for key, value in options.items():
        # null and false have no effect where the template does not read them.
        if value is not None and value is not False and not template.mentions(key):
            raise UnsupportedParameter(
                "{} is nothing that this model's chat template knows: leave it out",
                FieldPath("chat_template_kwargs", key),
            )
    if options.get(BUILTIN):
        raise UnsupportedParameter(
            "{}: this server runs none of the tools that a model brings along, so that their "
            "calls would have no answer: leave it out, and offer functions in {tools}",
            FieldPath("chat_template_kwargs", BUILTIN),
        )
    effort = options.get(EFFORT)
    if effort is not None and (levels := effort_levels(template)) and effort not in levels:
        by_kwargs = body.reasoning_effort is None
        path = FieldPath("chat_template_kwargs", EFFORT) if by_kwargs else FieldPath(EFFORT)
        raise UnsupportedParameter(
            "{} is {}: this model reasons at the levels {}; use one of them, or leave it out",
            (path, effort, ", ".join(levels)),
        )
    return options


def _check_switch(effort: str | None, options: Mapping[str, Any]) -> None:
    """Raises RequestError for a switch that is misread, or that the effort contradicts."""
    switch = options.get(SWITCH)
    path = FieldPath("chat_template_kwargs", SWITCH)
    if isinstance(switch, str):  # which is true in a template, "false" too
        raise RequestError(
            '{} is the text "{}": send true or false', (path, switch[:40]), code="invalid_type"
        )
    if effort is not None and switch is not None and (effort == "none") == bool(switch):
        raise RequestError(
            "{reasoning_effort} is {} and {} is {}, which is the opposite: leave one of them out",
            (effort, path, str(switch).lower()),
        )


def effort_levels(template: ChatTemplate) -> tuple[str, ...]:
    """The levels of reasoning_effort that the model was trained with; () if that is not known."""
    reasoning = detect(template.source).reasoning
    return () if reasoning is None else reasoning.levels


def _variable(name: str, value: str, template: ChatTemplate) -> dict[str, Any]:
    if template.mentions(name):
        return {name: value}
    if name == EFFORT and value == "none" and template.mentions(SWITCH):
        return {SWITCH: False}
    if value in HARMLESS[name]:
        return {}
    raise UnsupportedParameter(
        "{} is {}: this model's chat template has no place for it; use {}, or leave it out",
        (FieldPath(name), value, " or ".join(HARMLESS[name])),
    )
