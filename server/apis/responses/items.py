"""Items as they are kept and listed: plain JSON, each with an id."""

from __future__ import annotations

import uuid
from typing import Any

from server.apis.responses.item_schema import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
)
from server.apis.responses.schema import ResponsesRequest

JsonItem = dict[str, Any]
InputItem = (
    MessageItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
    | ItemReference
)
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(body: ResponsesRequest) -> list[JsonItem]:
    """The items of `input` with what a caller may leave out filled in."""
    if isinstance(body.input, str):
        return [_message("user", [{"type": "input_text", "text": body.input}])]
    return [_filled_in(item) for item in body.input]


def _message(role: str, content: list[JsonItem]) -> JsonItem:
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": content,
    }


def _filled_in(item: InputItem) -> JsonItem:
    if isinstance(item, ItemReference):
        return {"type": "item_reference", "id": item.id}
    fields = item.model_dump(mode="json", exclude_none=True)
    if isinstance(item, MessageItem):
        if isinstance(item.content, str):
            fields["content"] = [_text_part(item.role, item.content)]
        for part in fields["content"]:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    if isinstance(item, ReasoningItem):
        fields.setdefault("summary", [])
    given = {"id": new_id(PREFIXES[item.type]), "type": item.type, "status": "completed"}
    return given | fields


def _text_part(role: str, text: str) -> JsonItem:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def text_of(parts: list[JsonItem]) -> str:
    """The text of a message's parts, whatever their type."""
    return "\n".join(part.get("text", part.get("refusal", "")) for part in parts)
