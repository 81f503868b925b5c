"""A body of /api/chat or /api/generate -> a ChatRequest, or a CompletionRequest for raw text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec.structs import replace

from runtime.messages import Ready
from server.apis.field_names import Parts
from server.apis.media import Readable
from server.apis.ollama.schema import (
    SAMPLING,
    OllamaBody,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaToolCall,
)
from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.completions_schema import CompletionRequest
from server.apis.openai.sampling_schema import LATER
from server.apis.reasoning_switch import thinking_fields
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.generation.sampling_params import check_chars, fit_to_context
from server.http.validation import MAX_MESSAGES, Unsupported, fields_of, items_of, parse
from server.prompt.fim import prompt_with_gap
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState

IMAGES = "images"
# Of a data URL without a media type: see server/images/source.py.
DATA, ANY_IMAGE = "data:", "image/*"
MAX_CALLS = 16384  # each costs time to check, whatever it holds
REFUSED_FIELDS: Mapping[str, Unsupported] = {
    "template": Unsupported("the model's own chat template is used; or send `raw`", ""),
    "context": Unsupported("send the conversation to /api/chat", []),
    "truncate": Unsupported("a prompt that is too long is an error; use false", False),
    "shift": Unsupported("an answer ends where the context does; use false", False),
    "width": Unsupported(LATER, 0),
    "height": Unsupported(LATER, 0),
    "steps": Unsupported(LATER, 0),
}
REFUSED_OPTIONS: Mapping[str, Unsupported] = {
    "mirostat": Unsupported("use `top_p` or `min_p`", 0),
    "mirostat_tau": Unsupported("it belongs to `mirostat`"),
    "mirostat_eta": Unsupported("it belongs to `mirostat`"),
    "tfs_z": Unsupported("use `top_p` or `min_p`", 1, 1.0),
    "typical_p": Unsupported("use `top_p` or `min_p`", 1, 1.0),
    "repeat_last_n": Unsupported("penalties look at the whole text; use -1", -1),
    "penalize_newline": Unsupported("every token is treated alike; use true", True),
    "f16_kv": Unsupported("the server's --kv-dtype decides"),
    "logits_all": Unsupported("use `logprobs`", False),
    "vocab_only": Unsupported(LATER, False),
    "embedding_only": Unsupported(LATER, False),
}


def known_fields(fields: dict[str, Any], readable: Readable) -> dict[str, Any]:
    """The body without unsupported options whose values change nothing.

    Raises UnsupportedParameter for an option or an image that cannot be honoured.
    """
    calls = 0
    for index, message in enumerate(items_of(fields.get("messages"))[:MAX_MESSAGES]):
        calls += len(items_of(fields_of(message).get("tool_calls")))
        if calls > MAX_CALLS:
            raise RequestError("{messages} has more than {} tool calls: send fewer", MAX_CALLS)
        if fields_of(message).get("images"):
            readable.check_field(FieldPath("messages", index, "images"))
    if fields.get("images"):
        readable.check_field(FieldPath("images"))
    options = fields_of(fields.get("options"))
    kept = dict(options)
    for name, entry in REFUSED_OPTIONS.items():
        if name in kept and not entry.is_noop(kept.pop(name)):
            raise UnsupportedParameter(
                "{} is not supported by this server: {}", (FieldPath("options", name), entry.remedy)
            )
    return {**fields, "options": kept} if len(kept) < len(options) else fields


# For map_error_fields: ChatRequest's name of a field -> Ollama's
FIELDS = {
    "messages.*.name": "messages.*.tool_name",
    "messages.*.reasoning_content": "messages.*.thinking",
    "continue_final_message": "messages",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "response_format": "format",
    "structured_outputs": "format",
    "structured_outputs.json": "format",
    **{name: f"options.{option}" for option, name in SAMPLING.items()},
}
TEXT_FIELDS = FIELDS | {"logprobs": "top_logprobs"}  # of a CompletionRequest
PROMPT = FieldPath("prompt")


def to_chat_request(body: OllamaChatBody, tokenizer: ChatTokenizer) -> ChatRequest:
    """Raises RequestError for what the model cannot do."""
    chat = _shared(body, tokenizer)
    chat["messages"] = _messages(body.messages or [])
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        index = len(chat["messages"]) - 1
        if isinstance(last["content"], str) and not last["content"].strip():
            raise RequestError(
                "{} is the last one, of role assistant, and has no text for the answer to go on "
                "from: give it some or leave the message out",
                FieldPath("messages", index),
                param=FieldPath("messages", index, "content"),
            )
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = body.tools
    return parse(ChatRequest, chat)


def with_images(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """The content of a chat message: the images stand before the text."""
    if not images:
        return text
    # There is no media type: the bytes say what they are.
    urls = [{"url": f"{DATA}{ANY_IMAGE};base64,{image}"} for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def image_parts(messages: Sequence[OllamaMessage]) -> Parts:
    """For map_error_fields: the caller's field of each image."""
    return {
        FieldPath("messages", index, "content", place): FieldPath("messages", index, IMAGES, place)
        for index, message in enumerate(messages)
        for place in range(len(message.images or ()))
    }


def prompt_image_parts(body: OllamaGenerateBody) -> Parts:
    """The same of the one message that `prompt_to_chat_request` makes of a prompt."""
    index = 1 if body.system else 0
    return {
        FieldPath("messages", index, "content", place): FieldPath(IMAGES, place)
        for place in range(len(body.images or ()))
    }


def prompt_to_chat_request(body: OllamaGenerateBody, tokenizer: ChatTokenizer) -> ChatRequest:
    """Raises RequestError for what the model cannot do."""
    content = with_images(body.prompt or "", body.images)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return parse(ChatRequest, _shared(body, tokenizer) | {"messages": messages})


async def to_completion_request(state: ServerState, body: OllamaGenerateBody) -> CompletionRequest:
    """A text that goes to the model as it is: `raw`, or one with a gap before its `suffix`.

    Raises RequestError if the model cannot fill a gap, or if the text is too long.
    """
    ready = require_ready(state)
    tokenizer = state.tokenizer
    text = body.prompt or ""
    if body.suffix:
        text = prompt_with_gap(text, body.suffix, tokenizer, body.model)
    check_chars(len(text), tokenizer, ready, PROMPT)
    tokens = await off_loop(len(text), lambda: tokenizer.encode(text))
    fields = body.sampling()
    # Unlike OpenAI's completions, an answer may fill the context, and ends where that does.
    room = fit_to_context(len(tokens), None, ready.max_model_len, PROMPT)
    fields["max_tokens"] = min(fields.get("max_tokens") or room, room)
    return parse(CompletionRequest, fields | {"logprobs": body.num_logprobs, "prompt": tokens})


def with_context(ready: Ready, body: OllamaCall) -> Ready:
    """The engine's facts with the requested context length.  Raises RequestError if it is over."""
    num_ctx = body.num_ctx
    if num_ctx is None:
        return ready
    if num_ctx > ready.max_model_len:
        raise RequestError(
            "{options.num_ctx} is {}, over the maximum context length {}: lower it or leave it out",
            (num_ctx, ready.max_model_len),
        )
    return replace(ready, max_model_len=num_ctx)


def _shared(body: OllamaBody, tokenizer: ChatTokenizer) -> dict[str, Any]:
    chat = body.sampling() | {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if body.think is not None:
        chat |= thinking_fields(tokenizer, body.think, FieldPath("think"))
    return chat


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and name of calls that have no result yet
    for index, message in enumerate(messages):
        content = with_images(message.content or "", message.images)
        entry: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            calls = [_call(call, f"call_{index}_{n}") for n, call in enumerate(message.tool_calls)]
            entry["tool_calls"] = calls
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
        if message.thinking:
            entry["reasoning_content"] = message.thinking
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id or _answered(message, index, waiting)
            if message.tool_name:
                entry["name"] = message.tool_name
        entries.append(entry)
    return entries


def _call(call: OllamaToolCall, default_id: str) -> dict[str, Any]:
    # Ollama's calls need no id; a ChatRequest's tie a result to its call.
    function = {
        "name": call.function.name,
        "arguments": orjson.dumps(call.function.arguments).decode(),
    }
    return {"id": call.id or default_id, "type": "function", "function": function}


def _answered(message: OllamaMessage, index: int, waiting: list[tuple[str, str]]) -> str:
    """The id of the call that a result is for: the first of its name, else the first."""
    for position, (id, name) in enumerate(waiting):
        if message.tool_name in (None, "", name):
            del waiting[position]
            return id
    return f"call_{index}"
