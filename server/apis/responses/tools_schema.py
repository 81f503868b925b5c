"""Tools in a Responses request: functions and custom tools, without a level that chat has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticKnownError

from server.apis.openai.tools_schema import MAX_TOOLS, FunctionName, Parameters, kind_tag
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.http.validation import Body, fields_of, items_of, kind_of, tagged_union

Description = Annotated[str, Field(max_length=65536)]


class ListedTool(Body):
    """The tools of a response are sent again as OpenAI's client dumps them: with these, null."""

    model_config = ConfigDict(populate_by_name=True)
    name: FunctionName
    description: Description | None = None
    allowed_callers: None = None
    async_: None = Field(None, alias="async")
    defer_loading: None = None


class ResponsesFunctionTool(ListedTool):
    type: Literal["function"]
    parameters: Parameters | None = None
    strict: bool | None = None
    output_schema: None = None

    def as_chat(self) -> dict[str, Any]:
        """As chat completions take it."""
        # Without a copy of the schema, which may be large.
        fields = {name: value for name, value in self if value is not None and name != "type"}
        return {"type": "function", "function": fields}


class ResponsesCustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(min_length=1, max_length=65536)] | None = None


class ResponsesCustomTool(ListedTool):
    type: Literal["custom"]
    format: ResponsesCustomFormat | None = None

    def as_chat(self) -> dict[str, Any]:
        """As chat completions take it."""
        custom = self.model_dump(exclude_none=True, exclude={"type", "format"})
        if self.format is not None:
            grammar = self.format.model_dump(exclude_none=True, exclude={"type"})
            custom["format"] = {"type": self.format.type}
            custom["format"] |= {"grammar": grammar} if grammar else {}
        return {"type": "custom", "custom": custom}


ResponseTool = Annotated[
    Annotated[ResponsesFunctionTool, Tag("~function")]
    | Annotated[ResponsesCustomTool, Tag("~custom")],
    Discriminator(kind_tag),
]


class ResponsesNamedTool(Body):
    type: Literal["function", "custom"]
    name: FunctionName

    def as_chat(self) -> dict[str, Any]:
        """As chat completions take it."""
        return {"type": self.type, self.type: {"name": self.name}}


def _known_type(value: object) -> object:
    if value not in ("function", "custom"):
        raise PydanticKnownError(
            "literal_error", {"expected": "'function', 'custom' or 'allowed_tools'"}
        )
    return value


class ChosenTool(ResponsesNamedTool):
    type: Annotated[Literal["function", "custom"], BeforeValidator(_known_type)]


class ResponsesAllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "~word"
    kind = fields_of(value).get("type")
    if kind_of(value) != "object":
        return None
    return "~allowed" if kind == "allowed_tools" else "~named"


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[ChosenTool, Tag("~named")]
    | Annotated[ResponsesAllowedTools, Tag("~allowed")],
    tagged_union(
        _choice_kind,
        '"none", "auto", "required" or an object of type function, custom or allowed_tools',
    ),
]


def check_tools(
    tools: Sequence[ResponsesFunctionTool | ResponsesCustomTool] | None,
    choice: str | ResponsesNamedTool | ResponsesAllowedTools | None,
) -> None:
    """Raises RequestError for an allowed tool that is not offered."""
    if not isinstance(choice, ResponsesAllowedTools):
        return
    offered = {(tool.type, tool.name) for tool in tools or ()}
    for index, tool in enumerate(choice.tools):
        if (tool.type, tool.name) not in offered:
            path = FieldPath("tool_choice", "tools", index, "name")
            raise RequestError(
                "{} is {}, which is not among {tools}: add it there or leave it out",
                (path, tool.name),
            )


def refuse_foreign_tools(fields: dict[str, Any]) -> None:
    """Raises UnsupportedParameter for a tool that OpenAI runs itself, naming it."""
    for index, tool in enumerate(items_of(fields.get("tools"))):
        _refuse_tool(tool, FieldPath("tools", index, "type"), ("function", "custom"))
    choice = fields.get("tool_choice")
    _refuse_tool(choice, FieldPath("tool_choice", "type"), ("function", "custom", "allowed_tools"))


def _refuse_tool(value: object, path: FieldPath, known: tuple[str, ...]) -> None:
    kind = fields_of(value).get("type")
    if isinstance(kind, str) and kind not in known:
        raise UnsupportedParameter(
            "{} is {}: this server runs no tools of its own; use type {} or {}",
            (path, kind[:40], ", ".join(known[:-1]), known[-1]),
        )
