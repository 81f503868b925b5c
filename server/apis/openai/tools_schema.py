"""Tools in a chat request: functions, and custom tools that take any text.

Models know functions only: to them a custom tool is a function of one text, `input`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, PydanticKnownError

from server.errors import FieldPath, MissingParameter, RequestError
from server.http.validation import (
    NAMES_WITH_DOTS,
    Body,
    few_entries,
    fields_of,
    kind_of,
    tagged_union,
)

MAX_TOOLS = 128
INPUT = "input"  # the one argument of a custom tool

FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=NAMES_WITH_DOTS)]


def _object_schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise PydanticCustomError("schema", "it must be a JSON schema of type object")
    return value


Parameters = Annotated[
    dict[str, Any], BeforeValidator(few_entries(1024)), AfterValidator(_object_schema)
]


class FunctionDefinition(Body):
    name: FunctionName
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


def function_or(words: str) -> BeforeValidator:
    """Validates a function's type; `words` are the other types, for the error's message."""

    def check(value: object) -> object:
        if value != "function":
            raise PydanticKnownError("literal_error", {"expected": f"'function'{words}"})
        return value

    return BeforeValidator(check)


FunctionWord = Annotated[Literal["function"], function_or(" or 'custom'")]


class FunctionTool(Body):
    type: FunctionWord
    function: FunctionDefinition

    @property
    def lark(self) -> None:
        """See CustomTool."""
        return None


class CustomGrammar(Body):
    definition: Annotated[str, Field(min_length=1, max_length=65536)]
    syntax: Literal["lark", "regex"]


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomDefinition(Body):
    name: FunctionName
    description: Annotated[str, Field(max_length=65536)] | None = None
    format: CustomFormat | None = None


class CustomTool(Body):
    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def grammar(self) -> CustomGrammar | None:
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def lark(self) -> str | None:
        """The grammar of the input, if it is written in Lark."""
        grammar = self.grammar
        return None if grammar is None or grammar.syntax != "lark" else grammar.definition

    @cached_property
    def function(self) -> FunctionDefinition:
        """The function that the model sees in its place."""
        text: dict[str, Any] = {"type": "string"}
        if self.grammar is not None and self.lark is None:
            text["pattern"] = f"^(?:{self.grammar.definition})$"
        if self.lark is not None:
            text["description"] = f"It follows this grammar in Lark:\n{self.lark}"
        parameters: dict[str, Any] = {"type": "object", "properties": {INPUT: text}}
        parameters |= {"required": [INPUT], "additionalProperties": False}
        return FunctionDefinition(
            name=self.custom.name,
            description=self.custom.description,
            parameters=parameters,
            strict=None if self.grammar is None else True,
        )


def kind_tag(value: object) -> str:
    """The tag of a tool, its name or its call."""
    return "~custom" if fields_of(value).get("type") == "custom" else "~function"


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[CustomTool, Tag("~custom")],
    Discriminator(kind_tag),
]
Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]


class FunctionNamed(Body):
    name: FunctionName


class NamedFunction(Body):
    type: FunctionWord
    function: FunctionNamed


class ChosenFunction(NamedFunction):
    type: Annotated[Literal["function"], function_or(", 'custom' or 'allowed_tools'")]


class NamedCustom(Body):
    type: Literal["custom"]
    custom: FunctionNamed

    @property
    def function(self) -> FunctionNamed:
        return self.custom


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("~function")] | Annotated[NamedCustom, Tag("~custom")],
    Discriminator(kind_tag),
]


class AllowedToolChoice(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolChoice


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "~word"
    if kind_of(value) != "object":
        return None
    return "~allowed" if fields_of(value).get("type") == "allowed_tools" else kind_tag(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[ChosenFunction, Tag("~function")]
    | Annotated[NamedCustom, Tag("~custom")]
    | Annotated[AllowedTools, Tag("~allowed")],
    tagged_union(
        _choice_kind,
        '"none", "auto", "required", {"type": "function", "function": ...}, '
        '{"type": "custom", "custom": ...} or {"type": "allowed_tools", "allowed_tools": ...}',
    ),
]


def _chosen(choice: object) -> dict[FieldPath, NamedTool]:
    """The tools that a tool_choice names, by their paths."""
    if isinstance(choice, AllowedTools):
        path = FieldPath("tool_choice", "allowed_tools", "tools")
        tools = choice.allowed_tools.tools
        return {path / index: tool for index, tool in enumerate(tools)}
    return (
        {FieldPath("tool_choice"): choice}
        if isinstance(choice, NamedFunction | NamedCustom)
        else {}
    )


def check_tools(
    tools: list[Tool] | None,
    choice: str | NamedFunction | NamedCustom | AllowedTools | None,
    parallel: bool | None,
) -> None:
    """The rules between the three.  Raises RequestError."""
    names: list[str] = []
    for index, tool in enumerate(tools or ()):
        name, path = tool.function.name, FieldPath("tools", index, tool.type)
        if name in names:
            raise RequestError(
                "{} is {}, which an earlier tool has: give each tool a name of its own",
                (path / "name", name),
            )
        names.append(name)
        if isinstance(tool, CustomTool):
            _check_format(tool.custom.format, path / "format" / "grammar")
    for field, value in (("parallel_tool_calls", parallel), ("tool_choice", choice)):
        if value not in (None, "none") and not tools:
            raise RequestError("{} needs {tools}: add them or leave it out", FieldPath(field))
    offered = {(tool.type, tool.function.name) for tool in tools or ()}
    for path, tool in _chosen(choice).items():
        if (tool.type, tool.function.name) not in offered:
            raise RequestError(
                "{tool_choice} names the {} {}, which is not among {tools} ({}): add it there, or "
                "name one of them",
                (tool.type, tool.function.name, ", ".join(names[:10])),
                param=path / tool.type / "name",
            )


def _check_format(format: CustomFormat | None, path: FieldPath) -> None:
    """Raises RequestError unless there is a grammar exactly in a format of type grammar."""
    if format is None or (format.type == "grammar") == (format.grammar is not None):
        return
    if format.grammar is None:
        raise MissingParameter("{} is required for type grammar: add it", path)
    raise RequestError("{} belongs to type grammar, here the type is text", path)
