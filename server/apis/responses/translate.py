"""A Responses request as a chat request, and errors of the latter with this route's fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.apis.field_names import Parts, map_error_fields
from server.apis.openai.chat_schema import ChatRequest
from server.apis.responses.items import (
    CALLS,
    OUTPUTS,
    JsonItem,
    chat_content,
    image_fields,
    text_of,
)
from server.apis.responses.schema import ResponsesRequest, ResponsesSchemaFormat
from server.apis.responses.tools_schema import ResponsesAllowedTools, ResponsesNamedTool
from server.errors import ContextTooLong, FieldPath, RequestError
from server.generation.chat_request import chat_prompt
from server.generation.off_loop import off_loop
from server.http.request_context import images_read
from server.http.validation import parse
from server.state import ServerState

T = TypeVar("T")

SAME_NAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "priority",
    "cache_salt", "chat_template_kwargs", "user",
)  # fmt: skip
SYSTEM = ("system", "developer")
CHARS_PER_ITEM = 256  # characters that take as long to look through as an item
REASONING = "reasoning_content"  # the field of a chat message
EARLIER = FieldPath("previous_response_id")
INPUT = FieldPath("input")
CALL = "messages.*.tool_calls.*"
# For map_error_fields: ChatRequest's name of a field -> this route's
FIELDS = {
    "messages": "input",
    "messages.*": "messages.*",
    "messages.*.content": "messages.*",
    "messages.*.tool_calls": "messages.*",
    **{CALL: CALL, f"{CALL}.function": CALL, f"{CALL}.custom": CALL},
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "tools.*.function": "tools.*",
    "tools.*.custom": "tools.*",
    "tools.*.custom.format.grammar": "tools.*.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}


@dataclass
class Conversation:
    """Chat messages, and the fields of the request that they come from.

    sources: of each message, the field of its content, then those of its tool calls
    """

    messages: list[JsonItem] = field(default_factory=list[JsonItem])
    sources: list[list[FieldPath]] = field(default_factory=list[list[FieldPath]])
    # Of each message, the fields of its images by their places in the content.
    images: list[dict[int, FieldPath]] = field(default_factory=list[dict[int, FieldPath]])

    def add(
        self, message: JsonItem, source: FieldPath, images: dict[int, FieldPath] | None = None
    ) -> None:
        self.messages.append(message)
        self.sources.append([source])
        self.images.append(images or {})

    def image_parts(self) -> Parts:
        """For map_error_fields."""
        return {
            FieldPath("messages", index, "content", place): path
            for index, images in enumerate(self.images)
            for place, path in images.items()
        }

    def add_item(self, item: JsonItem, source: FieldPath) -> None:
        kind = item["type"]
        if kind == "message":
            self._add_message(item, source)
        elif kind == "reasoning":
            self._add_reasoning(item, source)
        elif kind in CALLS:
            self._add_call(item, source)
        elif kind in OUTPUTS:
            message = {"role": "tool", "tool_call_id": item["call_id"]}
            message["content"] = chat_content(item["output"])
            self.add(message, source, _images(item, "output", source))

    def _add_message(self, item: JsonItem, source: FieldPath) -> None:
        message = {"role": item["role"], "content": chat_content(item["content"])}
        if item["role"] == "assistant" and self._only_reasoning():
            self.messages[-1] |= message
            self.sources[-1][0] = source
        else:
            self.add(message, source, _images(item, "content", source))

    def _add_reasoning(self, item: JsonItem, source: FieldPath) -> None:
        """Part of the answer that follows; the chat template decides what the model sees of it."""
        text = text_of(item.get("content") or item["summary"])
        if not text:
            return
        if not self._only_reasoning():
            self.add({"role": "assistant", "content": "", REASONING: []}, source)
        self.messages[-1][REASONING].append(text)

    def _only_reasoning(self) -> bool:
        """Whether the last message is reasoning whose answer may follow."""
        last = self.messages[-1] if self.messages else {}
        return REASONING in last and not last["content"] and "tool_calls" not in last

    def _add_call(self, item: JsonItem, source: FieldPath) -> None:
        """Part of the answer before it: the model's text, or its other calls."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": None}, source)
        kind, text = "function", "arguments"
        if item["type"] == "custom_tool_call":
            kind, text = "custom", "input"
        named = {"name": item["name"], text: item[text]}
        call = {"id": item["call_id"], "type": kind, kind: named}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.sources[-1].append(source)

    def _num_system(self) -> int:
        """How many messages of system and developer stand in front of the others."""
        roles = [message["role"] for message in self.messages]
        return next((i for i, role in enumerate(roles) if role not in SYSTEM), len(roles))

    def cuts(self) -> list[int]:
        """Messages before which the conversation may be cut: calls stay with their outputs."""
        start = self._num_system() + 1
        users = enumerate(self.messages[start:], start)
        return [index for index, message in users if message["role"] == "user"]

    def without(self, cut: int) -> Conversation:
        """Without the messages before `cut`, except those of the system in front."""
        first = self._num_system()
        return Conversation(
            self.messages[:first] + self.messages[cut:],
            self.sources[:first] + self.sources[cut:],
            self.images[:first] + self.images[cut:],
        )


def _images(item: JsonItem, name: str, source: FieldPath) -> dict[int, FieldPath]:
    if source is EARLIER:
        return dict.fromkeys(image_fields(item[name], source), EARLIER)
    return image_fields(item[name], source / name)


def conversation_of(
    body: ResponsesRequest, earlier: list[JsonItem], items: list[JsonItem]
) -> Conversation:
    """Instructions, the items of the earlier responses, and those of this request.

    Raises RequestError for a call without an output, or the other way round.
    """
    conversation = Conversation()
    if body.instructions:
        conversation.add(
            {"role": "system", "content": body.instructions}, FieldPath("instructions")
        )
    sources = [EARLIER] * len(earlier)
    one = isinstance(body.input, str)
    sources += [INPUT if one else INPUT / index for index in range(len(items))]
    open_calls: dict[str, FieldPath] = {}
    for item, source in zip([*earlier, *items], sources, strict=True):
        if item["type"] in CALLS:
            open_calls[item["call_id"]] = source
        elif item["type"] in OUTPUTS and not open_calls.pop(item["call_id"], None):
            raise RequestError(
                "no tool call found for the function call output with call_id {}: send the {} "
                "item before its output",
                (item["call_id"], item["type"].removesuffix("_output")),
                param=source / "call_id",
            )
        conversation.add_item(item, source)
    for call_id, source in open_calls.items():
        raise RequestError(
            "no tool output found for function call {}: send a function_call_output item with "
            "this call_id",
            call_id,
            param=INPUT if source is EARLIER else source,
        )
    # Joined once: a text that grew with every item would be copied as often.
    for message in conversation.messages:
        if REASONING in message:
            message[REASONING] = "\n".join(message[REASONING])
    return conversation


def chat_request(body: ResponsesRequest, conversation: Conversation) -> ChatRequest:
    """Raises RequestError for what the chat schema refuses, with the chat request's fields."""
    fields: dict[str, Any] = {
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "verbosity": body.text and body.text.verbosity,
        **{name: getattr(body, name) for name in SAME_NAME},
        **_format(body),
        **_tools(body),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    fields = {name: value for name, value in fields.items() if value is not None}
    return parse(ChatRequest, fields)


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """`text.format` as chat's response_format."""
    format = body.text and body.text.format
    if format is None or format.type == "text":
        return {}
    if not isinstance(format, ResponsesSchemaFormat):
        return {"response_format": {"type": format.type}}
    schema = format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    choice = body.tool_choice
    tools = body.tools or []
    if not tools and choice in (None, "none", "auto"):
        return {}  # OpenAI's clients send both without tools
    fields: dict[str, Any] = {"parallel_tool_calls": body.parallel_tool_calls if tools else None}
    if isinstance(choice, ResponsesAllowedTools):
        allowed = {"mode": choice.mode, "tools": [tool.as_chat() for tool in choice.tools]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif isinstance(choice, ResponsesNamedTool):
        fields["tool_choice"] = choice.as_chat()
    else:
        fields["tool_choice"] = choice
    return fields | {"tools": [tool.as_chat() for tool in tools] or None}


async def with_chat_request(
    state: ServerState,
    body: ResponsesRequest,
    conversation: Conversation,
    work: Callable[[ChatRequest], Awaitable[T]],
) -> T:
    """work(chat), with `truncation` auto on as many of the last messages as fit.

    Raises the RequestErrors of `work` with the names of this route's fields.
    """
    read = images_read.set({})  # a prompt that is cut is counted several times
    try:
        with map_error_fields(FIELDS, conversation.sources, conversation.image_parts()):
            chat = await _chat(body, conversation)
            if body.truncation != "auto" or await _fits(state, body, chat):
                return await work(chat)
        shorter = await _cut(state, body, conversation)
        with map_error_fields(FIELDS, shorter.sources, shorter.image_parts()):
            return await work(await _chat(body, shorter))
    finally:
        images_read.reset(read)


async def _cut(
    state: ServerState, body: ResponsesRequest, conversation: Conversation
) -> Conversation:
    """Without the fewest of the first messages; each cut is before a message of role user."""
    cuts = conversation.cuts()
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = conversation.without(cuts[middle])
        with map_error_fields(FIELDS, shorter.sources, shorter.image_parts()):
            fits = await _fits(state, body, await _chat(body, shorter))
        low, high = (low, middle) if fits else (middle + 1, high)
    return conversation.without(cuts[low]) if cuts else conversation


async def _chat(body: ResponsesRequest, conversation: Conversation) -> ChatRequest:
    size = CHARS_PER_ITEM * len(conversation.messages)
    return await off_loop(size, lambda: chat_request(body, conversation))


async def _fits(state: ServerState, body: ResponsesRequest, chat: ChatRequest) -> bool:
    try:
        ready, tokens = await chat_prompt(state, chat)
    except ContextTooLong:
        return False
    return len(tokens) + (body.max_output_tokens or 1) <= ready.max_model_len
