"""Body of POST /v1/chat/completions: the messages, their content, the fields around them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.apis.media import Readable
from server.apis.openai.sampling_schema import LATER, UNSUPPORTED, SamplingBody
from server.apis.openai.tools_schema import (
    INPUT,
    AllowedTools,
    FunctionWord,
    NamedCustom,
    NamedFunction,
    Tool,
    ToolChoice,
    Tools,
    check_tools,
    kind_tag,
)
from server.errors import FieldPath, RequestError
from server.http.validation import (
    MAX_MESSAGES,
    WRONG_KIND,
    Body,
    Note,
    Unsupported,
    by_kind,
    few_entries,
    fields_of,
    items_of,
)

MAX_PARTS = 16384  # of all messages: each costs time to check, whatever it holds
# Keys of chat_template_kwargs that the server itself passes to the template.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")


def _scalar(value: object) -> object:
    if isinstance(value, list | dict):
        raise PydanticCustomError(WRONG_KIND, "a string, a number, true, false or null")
    return value


TemplateOptions = Annotated[
    dict[str, Annotated[Any, AfterValidator(_scalar)]], BeforeValidator(few_entries(32))
]


class CacheBreakpoint(Body):
    """The end of a prefix to cache; it changes nothing, because every prefix is cached."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CachedPart(Body):
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | None, Field(exclude=True)] = None


class TextPart(CachedPart):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """Of an answer by OpenAI's models, sent back."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ImageDetail = Literal["auto", "low", "high", "original"]


class ImageUrl(Body):
    """An image: a data URL, or a URL that the server fetches if its operator allows the host."""

    url: str | None = None
    file_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None  # of /v1/files
    detail: ImageDetail | None = None


class ImagePart(CachedPart):
    """The one form of an image in a conversation, whatever API it comes from."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _tag_of(*kinds: str) -> Discriminator:
    """The tag of a part of one of these types; whatever is none gets the errors of a text part."""

    def tag(value: object) -> str:
        kind = getattr(value, "type", None) or fields_of(value).get("type")
        return f"~{kind}" if kind in kinds else "~text"

    return Discriminator(tag)


TextualPart = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[RefusalPart, Tag("~refusal")], _tag_of("refusal")
]
Part = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[RefusalPart, Tag("~refusal")]
    | Annotated[ImagePart, Tag("~image_url")],
    _tag_of("refusal", "image_url"),
]
Content = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Part], Field(min_length=1, max_length=1024), Tag("~parts")],
    by_kind("a string or an array of content parts", string="~text", array="~parts"),
]
TextContent = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[TextualPart], Field(min_length=1, max_length=1024), Tag("~parts")],
    by_kind("a string or an array of text parts", string="~text", array="~parts"),
]


class FunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    parsed_arguments: Note = None


class FunctionToolCall(Body):
    id: str
    type: FunctionWord = "function"
    function: FunctionCall
    index: Note = None  # of a call that was put together from a stream


class CustomCall(Body):
    name: str = Field(min_length=1, max_length=256)
    input: str


class CustomToolCall(Body):
    id: str
    type: Literal["custom"]
    custom: CustomCall
    index: Note = None

    @cached_property
    def function(self) -> FunctionCall:
        """The call of the function that stands for the custom tool."""
        arguments = orjson.dumps({INPUT: self.custom.input}).decode()
        return FunctionCall(name=self.custom.name, arguments=arguments)


ToolCall = Annotated[
    Annotated[FunctionToolCall, Tag("~function")] | Annotated[CustomToolCall, Tag("~custom")],
    Discriminator(kind_tag),
]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # May be empty, and the fields from `refusal` on may be there at all, because clients return
    # answers, of other servers too, as they are.
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Note = None  # where another server's answer cites pages
    parsed: Note = None  # of client.chat.completions.parse() and .stream()
    provider_specific_fields: Note = None  # LiteLLM's

    def reasoning_text(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    def text(self) -> str | None:
        if not self.content and self.refusal:
            return self.refusal
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if not isinstance(part, ImagePart))

    def images(self) -> list[tuple[int, ImageUrl]]:
        """The images, with their places in the content."""
        if self.content is None or isinstance(self.content, str):
            return []
        parts = enumerate(self.content)
        return [(place, part.image_url) for place, part in parts if isinstance(part, ImagePart)]


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class Prediction(Body):
    type: Literal["content"]
    content: TextContent


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    BeforeValidator(few_entries(16)),
]


class CacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(SamplingBody):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # Of the reasoning; -1: no limit of its own.
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**31)
    include_reasoning: bool | None = None  # in the answer; it counts in the usage either way
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None  # a hint for speed at OpenAI; it changes no answer
    service_tier: Literal["auto", "default"] | None = None  # there is one only; answers name it
    store: bool | None = None  # the answer is kept: GET /v1/chat/completions/{id}
    # These describe the caller to OpenAI's own services; they change no answer.
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    def limit(self) -> int | None:
        """The requested number of tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def offered(self) -> list[tuple[int, Tool]]:
        """Tools that the model may call, with their indices in `tools`."""
        if self.tool_choice == "none":
            return []
        tools = list(enumerate(self.tools or []))
        if not isinstance(self.tool_choice, AllowedTools):
            return tools
        allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return [(index, tool) for index, tool in tools if tool.function.name in allowed]

    def offered_tools(self) -> list[Tool]:
        return [tool for _, tool in self.offered()]

    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedFunction | NamedCustom)

    def named_tool(self) -> str | None:
        """The function that must be called."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedFunction | NamedCustom) else None

    def one_call(self) -> bool:
        """Whether an answer may have one call at most, as it has of a named function."""
        return self.parallel_tool_calls is False or self.named_tool() is not None

    def images(self) -> list[tuple[FieldPath, ImageUrl]]:
        """All images in order, with the paths of their fields."""
        return [
            (FieldPath("messages", index, "content", place, "image_url"), image)
            for index, message in enumerate(self.messages)
            if isinstance(message.content, list)
            for place, image in message.images()
        ]

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        self.check_sampling()
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise RequestError(
                "{max_tokens} is {} and {max_completion_tokens} is {}: send one of the two",
                (self.max_tokens, self.max_completion_tokens),
                param=FieldPath("max_completion_tokens"),
            )
        self.check_reported("top_logprobs", self.num_logprobs())
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "{top_logprobs} needs {logprobs} to be true: set it or leave {top_logprobs} out"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "{continue_final_message} and {add_generation_prompt} exclude each other: set one "
                "of them"
            )
        for key in self.chat_template_kwargs or ():
            path = FieldPath("chat_template_kwargs", key)
            if key in RESERVED or key.startswith("_"):
                raise RequestError("{} is set by the server: leave it out", path)


def check_parts(fields: dict[str, Any], readable: Readable) -> None:
    """Raises RequestError for more content parts and tool calls than are checked in little time,
    UnsupportedParameter with the path of a content part that the model does not read.
    """
    count = 0
    for index, message in enumerate(items_of(fields.get("messages"))[:MAX_MESSAGES]):
        parts = items_of(fields_of(message).get("content"))
        count += len(parts) + len(items_of(fields_of(message).get("tool_calls")))
        if count > MAX_PARTS:
            raise RequestError(
                "{messages} has more than {} content parts and tool calls in all: put texts "
                "together",
                MAX_PARTS,
            )
        for place, part in enumerate(parts):
            kind = fields_of(part).get("type")
            if kind == "refusal" and fields_of(message).get("role") == "assistant":
                continue
            if isinstance(kind, str) and kind != "text":
                path = FieldPath("messages", index, "content", place, "type")
                readable.check(kind, path, image="image_url", text="text")


CHAT_UNSUPPORTED: dict[str, Unsupported] = UNSUPPORTED | {
    "functions": Unsupported("use `tools`"),
    "function_call": Unsupported("use `tool_choice`", "none"),
    "modalities": Unsupported('use ["text"]', ["text"]),
    "audio": Unsupported(LATER),
    "web_search_options": Unsupported(LATER),
    "moderation": Unsupported(LATER),
    "reasoning": Unsupported(LATER),
    "thinking": Unsupported(LATER),
    "prompt_cache_retention": Unsupported(
        "prefixes are kept in memory; use in_memory", "in_memory"
    ),
    "echo": Unsupported("use /v1/completions", False),
    "chat_template": Unsupported("the model's own template is used"),
    "documents": Unsupported("put the documents into a message"),
    "add_special_tokens": Unsupported("the chat template adds them", False),
    "separate_reasoning": Unsupported("--reasoning-format none leaves it in the content", True),
    "stream_reasoning": Unsupported("it is streamed; use true", True),
    "enable_thinking": Unsupported("use `chat_template_kwargs`"),
}
