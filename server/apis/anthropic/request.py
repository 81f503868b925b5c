"""A body of /v1/messages -> ChatRequest."""

from __future__ import annotations

import re
from typing import Any

import orjson

from server.apis.anthropic.schema import (
    AnthropicTool,
    AnthropicToolChoice,
    Base64Source,
    CountRequest,
    FileSource,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    OutputConfig,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from server.apis.field_names import Parts, Sources
from server.apis.reasoning_switch import LEVEL, can_think, thinking_fields
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.prompt.tokenizer import ChatTokenizer

# Ids of tool calls, as the model's chat template knows them and as Anthropic writes them:
#     call_4bZ...                toolu_4bZ...
#     Ab3dE6gH9                  toolu_Ab3dE6gH9              models of Mistral's
#     functions.get_weather:0    toolu_functions-get_weather-0    models of Kimi's
# The chat templates of the last two print ids or check their form.  Other ids, those of Anthropic's
# own answers too, stay as they are.
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


Content = str | list[dict[str, Any]]  # of a chat message
# For map_error_fields: ChatRequest's name of a field -> Anthropic's
FIELDS = {
    "messages.*.tool_calls": "messages.*.content",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "structured_outputs": "output_config.format",
    "structured_outputs.json": "output_config.format.schema",
}
PATH = "path"  # of the caller's field, in parts of images while messages are joined
ERROR = {"type": "text", "text": "Error: "}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_request(
    body: CountRequest, tokenizer: ChatTokenizer
) -> tuple[dict[str, Any], Sources, Parts]:
    """The fields of a ChatRequest, and for map_error_fields the sources of its messages and images.

    Raises RequestError for what the model cannot do.
    """
    messages, sources, parts = _messages(body)
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    last = messages[-1]
    if last["role"] == "assistant":
        _check_prefill(last, sources[-1][0])
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
        chat |= _choice(body.tool_choice)
    if body.output_config is not None:
        chat |= _output(body.output_config, tokenizer)
    if body.thinking is not None:
        if body.thinking.type == "disabled":
            chat.pop(LEVEL, None)  # there is nothing to make an effort in
        chat |= _thinking(body.thinking, tokenizer)
    if isinstance(body, MessagesRequest):
        chat |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    return chat, sources, parts


def _check_prefill(last: dict[str, Any], path: FieldPath) -> None:
    """The answer goes on from a last message of the assistant: Anthropic's "prefill"."""
    if "tool_calls" in last:
        raise RequestError("{} is the last one and calls tools: send their results after it", path)
    if not last["content"].strip():
        raise RequestError(
            "{} is the last one, of role assistant, and has no text for the answer to go on from: "
            "give it some or leave the message out",
            path,
            param=path / "content",
        )


def _messages(body: CountRequest) -> tuple[list[dict[str, Any]], Sources, Parts]:
    messages: list[dict[str, Any]] = []
    sources: list[list[FieldPath]] = []
    contents: list[list[Content]] = []  # of each message: those of the turns that it joins
    if body.system is not None:
        messages.append({"role": "system"})
        sources.append([FieldPath("system")])
        contents.append([_text(body.system)])
    for index, message in enumerate(body.messages):
        for entry in _turn(message, FieldPath("messages", index, "content")):
            if messages and _joins(messages[-1], entry):
                contents[-1].append(entry["content"])
            else:
                messages.append(entry)
                sources.append([FieldPath("messages", index)])
                contents.append([entry["content"]])
    images: dict[FieldPath, FieldPath] = {}
    for index, (message, turns) in enumerate(zip(messages, contents, strict=True)):
        message["content"] = content = _joined(turns)
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if PATH in part:
                images[FieldPath("messages", index, "content", place)] = part.pop(PATH)
    return messages, sources, images


def _joined(turns: list[Content]) -> Content:
    texts = [turn for turn in turns if isinstance(turn, str)]
    if len(texts) == len(turns):
        return "\n\n".join(texts)
    parts: list[dict[str, Any]] = []
    for turn in turns:
        parts += turn if isinstance(turn, list) else [{"type": "text", "text": turn}]
    return parts


def _joins(last: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Anthropic and most chat templates join successive turns of one role."""
    plain = not {"tool_calls", "tool_call_id", "reasoning_content"} & (last.keys() | entry.keys())
    return plain and last["role"] == entry["role"]


def _turn(message: MessageParam, path: FieldPath) -> list[dict[str, Any]]:
    """A message as chat messages: each tool result as one, then the text, reasoning and calls.

    path: of its content
    """
    entries: list[dict[str, Any]] = []
    shown: list[tuple[FieldPath, TextBlock | ImageBlock]] = []
    reasoning_chunks: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.blocks()):
        match block:
            case TextBlock() | ImageBlock():
                shown.append((path / place, block))
            case ToolUseBlock():
                calls.append(_call(block))
            case ToolResultBlock():
                entries.append(_result(block, path / place / "content"))
            case ThinkingBlock():
                reasoning_chunks.append(block.thinking)
    chat_message: dict[str, Any] = {"role": message.role, "content": _content(shown)}
    if any(reasoning_chunks):
        chat_message["reasoning_content"] = "\n".join(reasoning_chunks)
    if calls:
        chat_message["tool_calls"] = calls
    return [*entries, chat_message] if shown or calls or not entries else entries


def _content(blocks: list[tuple[FieldPath, TextBlock | ImageBlock]]) -> Content:
    """Text, or parts where there are images, each with the path of the caller's field."""
    texts = [block.text for _, block in blocks if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return "\n".join(texts)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": _image_url(block), PATH: path / "source"}
        for path, block in blocks
    ]


def _image_url(block: ImageBlock) -> dict[str, str]:
    match block.source:
        case Base64Source(media_type=media_type, data=data):
            return {"url": f"data:{media_type};base64,{data}"}
        case UrlSource(url=url):
            return {"url": url}
        case FileSource(file_id=file_id):
            return {"file_id": file_id}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": model_id(block.id), "type": "function", "function": function}


def _result(block: ToolResultBlock, path: FieldPath) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        content = _content([(path / place, each) for place, each in enumerate(content)])
    if block.is_error:  # templates have no other place for it
        content = f"Error: {content}" if isinstance(content, str) else [ERROR, *content]
    return {"role": "tool", "tool_call_id": model_id(block.tool_use_id), "content": content}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "parameters": tool.input_schema,
        "description": tool.description,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _thinking(thinking: Thinking, tokenizer: ChatTokenizer) -> dict[str, Any]:
    if thinking.type == "adaptive" and can_think(tokenizer):
        return {}  # the template's default leaves it to the model
    return thinking_fields(tokenizer, thinking.type != "disabled", FieldPath("thinking"))


def _output(config: OutputConfig, tokenizer: ChatTokenizer) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config.format is not None:
        fields["structured_outputs"] = {"json": config.format.schema_}
    effort = config.effort
    if effort is None:
        return fields
    template = tokenizer.template
    if template is not None and template.mentions(LEVEL):
        return fields | {LEVEL: effort}
    if effort == "high":  # Anthropic's default
        return fields
    raise UnsupportedParameter(
        "{output_config.effort} is {}: this model's chat template has no place for it; use high, "
        "or leave it out",
        effort,
    )
