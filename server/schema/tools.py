"""Tools in a chat request: functions that the model may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.errors import RequestError
from server.schema.base import WRONG_KIND, Body, few_entries

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


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "~word"
    return "~named" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[NamedTool, Tag("~named")],
    Discriminator(
        _choice_kind,
        custom_error_type=WRONG_KIND,
        custom_error_message='"none", "auto", "required" or {"type": "function", "function": ...}',
    ),
]


def check_tools(
    tools: list[Tool] | None, choice: str | NamedTool | None, parallel: bool | None
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
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            known = ", ".join(names[:10])
            raise RequestError(
                f"`tool_choice` names {choice.function.name}, which is not among `tools` ({known})",
                param="tool_choice.function.name",
            )
        return
    raise RequestError("`tool_choice` needs `tools`: add them or leave it out", param="tool_choice")
