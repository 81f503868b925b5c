"""Query strings of the routes under /v1/responses/{id}."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.errors import RequestError, UnsupportedParameter
from server.schema.base import Body
from server.schema.response_items import ItemId
from server.schema.responses import Include


class RetrieveQuery(Body):
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    include_obfuscation: bool | None = None
    starting_after: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        if self.include_obfuscation:
            raise UnsupportedParameter(
                "`include_obfuscation` is not supported by this server: use false",
                param="include_obfuscation",
            )
        if self.starting_after is not None and not self.stream:
            raise RequestError(
                "`starting_after` is only allowed when `stream` is true: set it or leave "
                "`starting_after` out",
                param="starting_after",
            )


class ItemsQuery(Body):
    after: ItemId | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
