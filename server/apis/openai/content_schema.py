"""The content of a message: a text, or parts of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from server.errors import RequestError, UnsupportedParameter
from server.http.validation import MAX_MESSAGES, Body, by_kind, fields_of, items_of

MAX_PARTS = 16384  # of all messages: each costs time to check, whatever it holds


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """Of an answer by OpenAI's models, sent back."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: object) -> str:
    # Whatever is neither gets the text part's errors.
    refused = isinstance(value, RefusalPart) or fields_of(value).get("type") == "refusal"
    return "~refusal" if refused else "~text"


Part = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[RefusalPart, Tag("~refusal")],
    Discriminator(_part_kind),
]


Content = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Part], Field(min_length=1, max_length=1024), Tag("~parts")],
    by_kind("a string or an array of text parts", string="~text", array="~parts"),
]


def check_parts(fields: dict[str, Any]) -> None:
    """Raises RequestError for more parts and tool calls than can be looked through in little time,
    UnsupportedParameter for a content part that is not text, naming the part.
    """
    count = 0
    for index, message in enumerate(items_of(fields.get("messages"))[:MAX_MESSAGES]):
        parts = items_of(fields_of(message).get("content"))
        count += len(parts) + len(items_of(fields_of(message).get("tool_calls")))
        if count > MAX_PARTS:
            raise RequestError(
                f"`messages` has more than {MAX_PARTS} content parts and tool calls in all: put "
                "texts together",
                param="messages",
            )
        for place, part in enumerate(parts):
            kind = fields_of(part).get("type")
            if kind == "refusal" and fields_of(message).get("role") == "assistant":
                continue
            if isinstance(kind, str) and kind != "text":
                path = f"messages[{index}].content[{place}].type"
                raise UnsupportedParameter(
                    f"`{path}` is {kind[:40]}: this model reads text only; send parts of type text",
                    param=path,
                )
