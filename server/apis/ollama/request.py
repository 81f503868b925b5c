"""A body of /api/chat or /api/generate -> the ChatRequest that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from runtime.messages import Ready
from server.apis.ollama.schema import (
    OllamaBody,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaToolCall,
)
from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.sampling_schema import LATER
from server.apis.reasoning_switch import thinking_fields
from server.errors import RequestError, UnsupportedParameter
from server.http.validation import MAX_MESSAGES, Unsupported, fields_of, items_of, parse
from server.prompt.tokenizer import ChatTokenizer

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


def known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The body without options that ask for nothing.

    Raises UnsupportedParameter for an option or an image that cannot be honoured.
    """
    calls = 0
    for index, message in enumerate(items_of(fields.get("messages"))[:MAX_MESSAGES]):
        calls += len(items_of(fields_of(message).get("tool_calls")))
        if calls > MAX_CALLS:
            raise RequestError(
                f"`messages` has more than {MAX_CALLS} tool calls: send fewer", param="messages"
            )
        if fields_of(message).get("images"):
            _refuse_images(f"messages[{index}].images")
    if fields.get("images"):
        _refuse_images("images")
    options = fields_of(fields.get("options"))
    kept = dict(options)
    for name, entry in REFUSED_OPTIONS.items():
        if name in kept and not entry.is_noop(kept.pop(name)):
            raise UnsupportedParameter(
                f"`options.{name}` is not supported by this server: {entry.remedy}",
                param=f"options.{name}",
            )
    return {**fields, "options": kept} if len(kept) < len(options) else fields


def _refuse_images(path: str) -> None:
    raise UnsupportedParameter(
        f"`{path}`: this model reads text only; leave images out", param=path
    )


# For map_error_fields: ChatRequest's and CompletionRequest's name of a field -> Ollama's
FIELDS = {
    r"(messages\[\d+\])\.reasoning_content": r"\1.thinking",
    r"response_format\.json_schema\.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
}


def to_chat_request(body: OllamaChatBody, tokenizer: ChatTokenizer) -> ChatRequest:
    """Raises RequestError for what the model cannot do."""
    chat = _shared(body, tokenizer)
    chat["messages"] = _messages(body.messages or [])
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        _check_beginning(last["content"], len(chat["messages"]) - 1)
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = body.tools
    return parse(ChatRequest, chat)


def prompt_to_chat_request(body: OllamaGenerateBody, tokenizer: ChatTokenizer) -> ChatRequest:
    """Raises RequestError for what the model cannot do."""
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return parse(ChatRequest, _shared(body, tokenizer) | {"messages": messages})


def _check_beginning(content: str, index: int) -> None:
    """The answer goes on from a last message of the assistant, so that has to say something."""
    if not content.strip():
        raise RequestError(
            f"`messages[{index}]` is the last one, of role assistant, and has no text for the "
            "answer to go on from: give it some or leave the message out",
            param=f"messages[{index}].content",
        )


def check_context(body: OllamaCall, ready: Ready) -> None:
    """Raises RequestError if `num_ctx` asks for more than there is."""
    wanted = body.options.num_ctx if body.options is not None else None
    if wanted is not None and wanted > ready.max_model_len:
        raise RequestError(
            f"`options.num_ctx` is {wanted}, over the maximum context length "
            f"{ready.max_model_len}: lower it or leave it out",
            param="options.num_ctx",
        )


def _shared(body: OllamaBody, tokenizer: ChatTokenizer) -> dict[str, Any]:
    chat = body.sampling() | {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if body.think is not None:
        chat |= thinking_fields(tokenizer, body.think, "think")
    return chat


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and name of calls that have no result yet
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            calls = [_call(call, index, place) for place, call in enumerate(message.tool_calls)]
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


def _call(call: OllamaToolCall, index: int, place: int) -> dict[str, Any]:
    # Ollama's calls need no id; ours tie a result to its call.
    function = {
        "name": call.function.name,
        "arguments": orjson.dumps(call.function.arguments).decode(),
    }
    return {"id": call.id or f"call_{index}_{place}", "type": "function", "function": function}


def _answered(message: OllamaMessage, index: int, waiting: list[tuple[str, str]]) -> str:
    """The id of the call that a result is for: the first of its name, else the first."""
    for place, (id, name) in enumerate(waiting):
        if message.tool_name in (None, "", name):
            del waiting[place]
            return id
    return f"call_{index}"
