"""Body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from server.apis.openai.chat_schema import CacheOptions, Effort, Metadata, TemplateOptions
from server.apis.openai.sampling_schema import INT64, LATER, Stop
from server.apis.openai.tools_schema import MAX_TOOLS, FunctionName
from server.apis.responses.items import MAX_ITEMS, Item, ItemId, check_roles
from server.apis.responses.tools_schema import ResponsesToolChoice, ResponseTool, check_tools
from server.errors import FieldPath, RequestError, UnknownParameter, UnsupportedParameter
from server.http.validation import (
    Body,
    Unsupported,
    by_kind,
    fields_of,
    tagged_union,
)

LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Includes = Annotated[list[Include], Field(max_length=16)]

Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("~items")
    ],
    by_kind("a string or an array of items", string="~text", array="~items"),
]


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class ResponsesSchemaFormat(Body):
    type: Literal["json_schema"]
    name: FunctionName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


def _format_kind(value: object) -> str | None:
    kind = fields_of(value).get("type")
    if kind in ("text", "json_object"):
        return "~plain"
    return "~schema" if kind == "json_schema" else None


class TextConfig(Body):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag("~plain")]
            | Annotated[ResponsesSchemaFormat, Tag("~schema")],
            tagged_union(_format_kind, "an object of type text, json_object or json_schema"),
        ]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    # The chat template decides which earlier reasoning the model reads again.
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    # Reasoning is returned whole, which no summary says more than.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """null stands for "the default" in every field, as in OpenAI's API."""

    model: str
    input: Input
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Includes | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # It bounds calls of OpenAI's own tools, of which there are none here.
    max_tool_calls: int | None = Field(None, ge=1)
    # These describe the caller to OpenAI's own services; they change no answer.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    # Sampling beyond OpenAI's, as in chat completions, which check them further.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Stop | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        if not isinstance(self.input, str):
            check_roles(self.input)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "{stream_options} is only allowed when {stream} is true: set it or leave "
                "{stream_options} out"
            )
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise UnsupportedParameter(
                "{stream_options.include_obfuscation} is not supported by this server: use false"
            )
        if self.background and not self.stored:
            raise RequestError(
                "{background} needs {store} to be true, as there is no other way to fetch the "
                "response: leave {store} out",
                param=FieldPath("store"),
            )
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(
                '{top_logprobs} needs "{}" in {include}: add it or leave {top_logprobs} out',
                LOGPROBS,
            )
        check_tools(self.tools, self.tool_choice)


RESPONSES_UNSUPPORTED: dict[str, Unsupported] = {
    "conversation": Unsupported("use `previous_response_id`"),
    "prompt": Unsupported("put the text into `instructions` or `input`"),
    "context_management": Unsupported("shorten the input before sending it", []),
    "background_options": Unsupported(
        "a response in the background begins at once; use soonest",
        {"completion_window": "soonest"},
        {},
    ),
    "personality": Unsupported("describe the style in `instructions`"),
    "service_tier": Unsupported("use auto or default", "auto", "default"),
    "prompt_cache_retention": Unsupported(
        "prefixes are kept in memory; use in_memory", "in_memory"
    ),
    "moderation": Unsupported(LATER),
    "access_programs": Unsupported(LATER),
    "image": Unsupported(LATER),
    "n": Unsupported("send several requests", 1),
    "messages": Unsupported("use `input`"),
    "max_tokens": Unsupported("use `max_output_tokens`"),
    "max_completion_tokens": Unsupported("use `max_output_tokens`"),
    "response_format": Unsupported("use `text.format`"),
    "reasoning_effort": Unsupported("use `reasoning.effort`"),
}

# Parameters of the route that counts the tokens of an input.
COUNTED = frozenset(
    {
        "model", "input", "instructions", "previous_response_id", "conversation", "tools",
        "tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation",
        "chat_template_kwargs", "personality",
    }
)  # fmt: skip


def refuse_uncounted(fields: dict[str, Any]) -> None:
    """Raises UnknownParameter for a field that requests to count tokens do not have."""
    for name in fields:
        if name not in COUNTED:
            raise UnknownParameter(
                "{} is not a parameter of this route: remove it", FieldPath(name[:64])
            )
