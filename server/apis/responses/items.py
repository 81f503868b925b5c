"""Items as they are stored and listed: plain JSON, each with an id."""

from __future__ import annotations

import uuid
from typing import Any

from server.apis.responses.item_schema import Item, ItemReference, MessageItem, ReasoningItem
from server.apis.responses.schema import ResponsesRequest

JsonItem = dict[str, Any]
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_id(item_type: str) -> str:
    return f"{PREFIXES[item_type]}_{uuid.uuid4().hex}"


def input_items(body: ResponsesRequest) -> list[JsonItem]:
    """The items of `input`, with defaults for what the request leaves out."""
    if isinstance(body.input, str):
        return [_to_json(MessageItem(role="user", content=body.input))]
    return [_to_json(item) for item in body.input]


def _to_json(item: Item) -> JsonItem:
    if isinstance(item, ItemReference):
        return {"type": "item_reference", "id": item.id}
    fields = item.model_dump(mode="json", exclude_none=True)
    if isinstance(item, MessageItem):
        if isinstance(item.content, str):
            text_type = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": text_type, "text": item.content}]
        for part in fields["content"]:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    if isinstance(item, ReasoningItem):
        fields.setdefault("summary", [])
    return {"id": new_id(item.type), "type": item.type, "status": "completed"} | fields


def text_of(parts: list[JsonItem]) -> str:
    """The text of a message's parts, whatever their type."""
    return "\n".join(part.get("text", part.get("refusal", "")) for part in parts)
