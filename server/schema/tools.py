"""Tools in a chat request: functions that the model may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.errors import RequestError
from server.schema.base import WRONG_KIND, Body, few_entries, fields_of, kind_of

MOST_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]+$"

FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=NAME)]


def _object_schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise PydanticCustomError("schema", "a JSON schema of type object")
    return value


Parameters = Annotated[
    dict[str, Any], BeforeValidator(few_entries(1024)), AfterValidator(_object_schema)
]


class FunctionDefinition(Body):
    name: FunctionName
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionNamed(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionNamed


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "~word"
    if kind_of(value) != "object":
        return None
    return "~allowed" if fields_of(value).get("type") == "allowed_tools" else "~named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[NamedTool, Tag("~named")]
    | Annotated[AllowedTools, Tag("~allowed")],
    Discriminator(
        _choice_kind,
        custom_error_type=WRONG_KIND,
        custom_error_message='"none", "auto", "required", {"type": "function", "function": ...} '
        'or {"type": "allowed_tools", "allowed_tools": ...}',
    ),
]


def _chosen(choice: object) -> list[tuple[str, str]]:
    """Names of tools in a tool_choice, with their paths."""
    if isinstance(choice, NamedTool):
        return [("tool_choice.function.name", choice.function.name)]
    if isinstance(choice, AllowedTools):
        path = "tool_choice.allowed_tools.tools"
        tools = enumerate(choice.allowed_tools.tools)
        return [(f"{path}[{place}].function.name", tool.function.name) for place, tool in tools]
    return []


def check_tools(
    tools: list[Tool] | None, choice: str | NamedTool | AllowedTools | None, parallel: bool | None
) -> None:
    """The rules between the three.  Raises RequestError."""
    names = [tool.function.name for tool in tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(
                f"`tools[{index}].function.name` is {name}, which an earlier tool has: give each "
                "tool a name of its own",
                param=f"tools[{index}].function.name",
            )
    if parallel is not None and not tools:
        raise RequestError(
            "`parallel_tool_calls` needs `tools`: add them or leave it out",
            param="parallel_tool_calls",
        )
    if choice in (None, "none") or tools:
        for path, name in _chosen(choice):
            if name not in names:
                known = ", ".join(names[:10])
                raise RequestError(
                    f"`tool_choice` names {name}, which is not among `tools` ({known})", param=path
                )
        return
    raise RequestError("`tool_choice` needs `tools`: add them or leave it out", param="tool_choice")
