"""Query strings and bodies of the routes of stored chat completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.schema.base import Body
from server.schema.chat import Metadata

Id = Annotated[str, Field(min_length=1, max_length=256)]


class ChatsQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    metadata: Metadata | None = None  # as metadata[key]=value
    model: str | None = None
    order: Literal["asc", "desc"] = "asc"


class MessagesQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "asc"


class ChatChange(Body):
    metadata: Metadata | None
