"""Items of `input`, messages, calls, their outputs and reasoning: their schema and stored JSON."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.apis.media import Readable
from server.apis.openai.chat_schema import CachedPart, ImageDetail, RefusalPart
from server.apis.openai.tools_schema import FunctionName
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.http.validation import Body, Note, by_kind, fields_of, items_of, tagged_union

JsonItem = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]
MAX_ITEMS = 16384
MAX_PARTS = 1024  # of an item
MAX_TOTAL_PARTS = 16384
IMAGE = "input_image"
MESSAGE_PARTS = ("input_text", "output_text", "refusal", IMAGE)
TEXT_TYPES = ("input_text", "output_text", "refusal", "reasoning_text", "summary_text")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEM_TYPES = ("message", *CALLS, *OUTPUTS, "reasoning", "item_reference")
PREFIXES = {  # of ids
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class InputText(CachedPart):
    type: Literal["input_text"]
    text: str


class InputImage(CachedPart):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    detail: ImageDetail | None = None


class OutputText(Body):
    """What an earlier answer said, as it came."""

    type: Literal["output_text"]
    text: str
    logprobs: list[Any] | None = None
    annotations: Note = None  # ours have none
    parsed: Note = None  # of client.responses.parse() and .stream()


def _part_kind(value: object) -> str | None:
    kind = fields_of(value).get("type")
    return f"~{kind}" if kind in MESSAGE_PARTS else None


MessagePart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[OutputText, Tag("~output_text")]
    | Annotated[RefusalPart, Tag("~refusal")]
    | Annotated[InputImage, Tag("~input_image")],
    tagged_union(_part_kind, "an object of type input_text, input_image, output_text or refusal"),
]


def _output_part_tag(value: object) -> str:
    # Whatever is neither gets the errors of a text.
    is_image = isinstance(value, InputImage) or fields_of(value).get("type") == IMAGE
    return "~input_image" if is_image else "~input_text"


OutputPart = Annotated[
    Annotated[InputText, Tag("~input_text")] | Annotated[InputImage, Tag("~input_image")],
    Discriminator(_output_part_tag),
]


MessageContent = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[MessagePart], Field(min_length=1, max_length=MAX_PARTS), Tag("~parts")],
    by_kind("a string or an array of parts", string="~text", array="~parts"),
]
CallOutput = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[OutputPart], Field(min_length=1, max_length=MAX_PARTS), Tag("~parts")],
    by_kind("a string or an array of parts of type input_text", string="~text", array="~parts"),
]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent
    id: ItemId | None = None
    status: Status | None = None
    # Of an answer by OpenAI's models; ours make no difference between the two.
    phase: Annotated[Literal["commentary", "final_answer"] | None, Field(exclude=True)] = None


class CallItem(Body):
    """What tool calls and their outputs have in common."""

    call_id: ItemId
    id: ItemId | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    created_by: Note = None


class MadeCallItem(CallItem):
    """A call; OpenAI's client calls its field `async` async_ when it dumps one."""

    model_config = ConfigDict(populate_by_name=True)
    name: FunctionName
    async_: None = Field(None, alias="async")


class FunctionCallItem(MadeCallItem):
    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Note = None


class FunctionOutputItem(CallItem):
    type: Literal["function_call_output"]
    output: CallOutput
    name: FunctionName | None = None


class CustomCallItem(MadeCallItem):
    type: Literal["custom_tool_call"]
    input: str


class CustomOutputItem(CallItem):
    type: Literal["custom_tool_call_output"]
    output: CallOutput
    name: FunctionName | None = None


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ItemReference(Body):
    type: Literal["item_reference"] | None = None
    id: ItemId


def _item_kind(value: object) -> str | None:
    fields = fields_of(value)
    kind = fields.get("type")
    if kind is None and ("role" in fields or "content" in fields):
        kind = "message"
    elif kind is None and "id" in fields:
        kind = "item_reference"
    return f"~{kind}" if kind in ITEM_TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[FunctionOutputItem, Tag("~function_call_output")]
    | Annotated[CustomCallItem, Tag("~custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("~custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    tagged_union(
        _item_kind,
        "an object of type message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, reasoning or item_reference",
    ),
]


def refuse_foreign_items(fields: dict[str, Any], readable: Readable) -> None:
    """Raises UnsupportedParameter for an item or a part of a type that this server lacks,
    RequestError for more of them than can be looked through in little time.
    """
    count = 0
    for index, item in enumerate(items_of(fields.get("input"))[:MAX_ITEMS]):
        path = FieldPath("input", index)
        _refuse_type(item, ITEM_TYPES, path, "send messages, function calls and their outputs")
        parts = fields_of(item)
        count += sum(len(items_of(parts.get(name))) for name in ("content", "output", "summary"))
        if count > MAX_TOTAL_PARTS:
            raise RequestError(
                "{input} has more than {} parts in all: put texts together", MAX_TOTAL_PARTS
            )
        for name in ("content", "output"):
            for place, part in enumerate(items_of(parts.get(name))):
                kind = fields_of(part).get("type")
                if isinstance(kind, str) and kind not in TEXT_TYPES:
                    field = path / name / place / "type"
                    readable.check(kind, field, image=IMAGE, text="input_text")


def _refuse_type(value: object, known: tuple[str, ...], path: FieldPath, remedy: str) -> None:
    kind = fields_of(value).get("type")
    if isinstance(kind, str) and kind not in known:
        raise UnsupportedParameter(
            "{} is {}, which this server does not take: {}", (path / "type", kind[:40], remedy)
        )


def check_roles(items: list[Any]) -> None:
    """Raises RequestError for a message with parts that belong to another role."""
    for index, item in enumerate(items):
        if not isinstance(item, MessageItem) or isinstance(item.content, str):
            continue
        for place, part in enumerate(item.content):
            if (part.type in ("input_text", IMAGE)) == (item.role == "assistant"):
                expected = "output_text" if item.role == "assistant" else "input_text"
                path = FieldPath("input", index, "content", place, "type")
                raise RequestError(
                    "{} is {}: a message of role {} has parts of type {}",
                    (path, part.type, item.role, expected),
                )


def new_id(item_type: str) -> str:
    return f"{PREFIXES[item_type]}_{uuid.uuid4().hex}"


def input_items(input: str | list[Item]) -> list[JsonItem]:
    """The items of a request, with defaults for what it leaves out."""
    if isinstance(input, str):
        return [_to_json(MessageItem(role="user", content=input))]
    return [_to_json(item) for item in input]


def _to_json(item: Item) -> JsonItem:
    if isinstance(item, ItemReference):
        return {"type": "item_reference", "id": item.id}
    fields = item.model_dump(mode="json", exclude_none=True)
    if isinstance(item, MessageItem):
        if isinstance(item.content, str):
            text_type = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [JsonItem(type=text_type, text=item.content)]
        for part in fields["content"]:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    if isinstance(item, ReasoningItem):
        fields.setdefault("summary", [])
    return {"id": new_id(item.type), "type": item.type, "status": "completed"} | fields


def text_of(parts: list[JsonItem]) -> str:
    """The text of a message's parts, whatever their type."""
    return "\n".join(_text(part) for part in parts)


def _text(part: JsonItem) -> str:
    return part.get("text", part.get("refusal", ""))


def chat_content(parts: str | list[JsonItem]) -> str | list[JsonItem]:
    """The content of a chat message: text, or its parts where there are images."""
    if isinstance(parts, str):
        return parts
    if not any(part["type"] == IMAGE for part in parts):
        return text_of(parts)
    return [
        {"type": "image_url", "image_url": _image_url(part)}
        if part["type"] == IMAGE
        else {"type": "text", "text": _text(part)}
        for part in parts
    ]


def _image_url(part: JsonItem) -> JsonItem:
    names = {"image_url": "url", "file_id": "file_id", "detail": "detail"}
    return {ours: part[name] for name, ours in names.items() if part.get(name) is not None}


def image_fields(parts: str | list[JsonItem], source: FieldPath) -> dict[int, FieldPath]:
    """The caller's field of each image of a message's parts, by its place in `chat_content`."""
    if isinstance(parts, str):
        return {}
    return {
        place: source / place / ("file_id" if part.get("file_id") else "image_url")
        for place, part in enumerate(parts)
        if part["type"] == IMAGE
    }
