"""Bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from server.apis.openai.sampling_schema import MAX_STOPS, StopString
from server.apis.openai.tools_schema import MAX_TOOLS, FunctionName, Parameters
from server.errors import RequestError
from server.http.validation import MAX_MESSAGES, Body, by_kind, few_entries, fields_of, tagged_union

MAX_BLOCKS = 1024  # of one message
MIN_BUDGET = 1024


class CacheControl(Body):
    """Accepted and of no effect: every prefix is cached, without being asked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(Body):
    cache_control: CacheControl | None = None


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str
    # Clients that send an answer back as they got it send this empty.
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: FunctionName
    input: Annotated[dict[str, Any], BeforeValidator(few_entries(1024))]
    caller: DirectCaller | None = None
    toolset_name: Annotated[str, Field(max_length=0)] | None = None


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=64)]
    data: str


class UrlSource(Body):
    type: Literal["url"]
    url: str


class FileSource(Body):
    type: Literal["file"]
    file_id: Annotated[str, Field(min_length=1, max_length=64)]


def _source_kind(value: object) -> str | None:
    kind = fields_of(value).get("type")
    return f"~{kind}" if kind in ("base64", "url", "file") else None


class ImageBlock(ContentBlock):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("~base64")]
        | Annotated[UrlSource, Tag("~url")]
        | Annotated[FileSource, Tag("~file")],
        tagged_union(_source_kind, "an object of type base64, url or file"),
    ]


def _result_block_tag(value: object) -> str:
    # A block without a known type gets the errors of a text block.
    return "~image" if fields_of(value).get("type") == "image" else "~text"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("~text")] | Annotated[ImageBlock, Tag("~image")],
    Discriminator(_result_block_tag),
]
ResultContent = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), Tag("~blocks")],
    by_kind("a string or an array of text and image blocks", string="~text", array="~blocks"),
]
Text = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Tag("~blocks")],
    by_kind("a string or an array of text blocks", string="~text", array="~blocks"),
]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: ResultContent | None = None
    is_error: bool | None = None
    toolset_name: Annotated[str, Field(max_length=0)] | None = None


def _block_tag(value: object) -> str:
    kind = fields_of(value).get("type")
    # A block without a known type gets the errors of a text block.
    return f"~{kind}" if kind in ("tool_use", "tool_result", "thinking", "image") else "~text"


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[ImageBlock, Tag("~image")],
    Discriminator(_block_tag),
]
Content = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[AnyBlock], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True), Tag("~blocks")
    ],
    by_kind("a string or an array of content blocks", string="~text", array="~blocks"),
]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Content

    def blocks(self) -> list[AnyBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class AnthropicTool(ContentBlock):
    name: FunctionName
    input_schema: Parameters
    description: Annotated[str, Field(max_length=65536)] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    # Arguments are always streamed as they are made.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=MIN_BUDGET)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], BeforeValidator(few_entries(1024))] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class AnthropicMetadata(Body):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class CountRequest(Body):
    """The fields that change the prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    system: Text | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        self._check_tools()
        self._check_thinking()

    def _check_tools(self) -> None:
        names = [tool.name for tool in self.tools or ()]
        choice = self.tool_choice
        if choice is None:
            return
        if choice.type != "none" and not names:
            raise RequestError("{tool_choice} needs {tools}: add them or leave it out")
        if (choice.type == "tool") != (choice.name is not None):
            raise RequestError(
                "{tool_choice.name} belongs to type tool, here the type is {}: name a tool with "
                "type tool and only with it",
                choice.type,
            )
        if choice.name is not None and choice.name not in names:
            raise RequestError(
                "{tool_choice.name} is {}, which is not among {tools} ({})",
                (choice.name, ", ".join(names[:10])),
            )
        if choice.type == "none" and choice.disable_parallel_tool_use is not None:
            raise RequestError(
                "{tool_choice.disable_parallel_tool_use} has no meaning with type none: leave it "
                "out"
            )

    def _check_thinking(self) -> None:
        thinking = self.thinking
        if thinking is not None and (thinking.type == "enabled") == (
            thinking.budget_tokens is None
        ):
            raise RequestError(
                "{thinking.budget_tokens} belongs to type enabled, here the type is {}: send it "
                "with type enabled and only with it",
                thinking.type,
            )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    # These describe the caller and the queue that Anthropic serves it from.
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def check(self) -> None:
        super().check()
        budget = self.thinking and self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise RequestError(
                "{thinking.budget_tokens} is {}: it must be less than {max_tokens}, here {}",
                (budget, self.max_tokens),
            )
