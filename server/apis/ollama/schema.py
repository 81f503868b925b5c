"""Bodies of Ollama's API."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from server.apis.openai.sampling_schema import INT64, Stop
from server.apis.openai.tools_schema import MAX_TOOLS, FunctionName, FunctionTool
from server.errors import FieldPath, MissingParameter, RequestError, UnsupportedParameter
from server.http.validation import MAX_MESSAGES, WRONG_KIND, Body, by_kind, few_entries

# option -> its name in a ChatRequest or a CompletionRequest
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "num_predict": "max_tokens",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class OllamaOptions(Body):
    """How to sample; the fields after `num_ctx` tell Ollama's runner how to use its machine."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-1, lt=INT64)
    num_predict: int | None = Field(None, ge=-2)
    stop: Stop | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    num_ctx: int | None = Field(None, ge=1)
    # The context never shifts, so all of the prompt is always kept.
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    numa: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The options as fields of a ChatRequest or a CompletionRequest."""
        fields = {name: getattr(self, option) for option, name in SAMPLING.items()}
        if self.seed == -1:  # any
            fields["seed"] = None
        if self.num_predict is not None and self.num_predict < 0:  # no limit
            fields["max_tokens"] = None
        return fields


Format = Annotated[
    Annotated[Literal["", "json"], Tag("~word")]
    | Annotated[dict[str, Any], BeforeValidator(few_entries(1024)), Tag("~schema")],
    by_kind('"json" or a JSON schema', string="~word", object="~schema"),
]


# A unit between any two numbers: without it there would be 2^n ways to read n digits.
DURATION = r"-?(\d+(\.\d+)?|(\d+(\.\d+)?(ns|us|ms|s|m|h))+)"


def _duration(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number and not (isinstance(value, str) and re.fullmatch(DURATION, value)):
        raise PydanticCustomError(WRONG_KIND, 'a number of seconds or a duration such as "5m"')
    return value


KeepAlive = Annotated[Any, AfterValidator(_duration)]


Think = Annotated[
    Annotated[bool, Tag("~switch")] | Annotated[Literal["low", "medium", "high"], Tag("~level")],
    by_kind('true, false, "low", "medium" or "high"', boolean="~switch", string="~level"),
]


class CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[dict[str, Any], BeforeValidator(few_entries(1024))]
    index: int | None = None  # unused: the calls are in order


class OllamaToolCall(Body):
    function: CalledFunction
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    type: Literal["function"] | None = None


Images = Annotated[list[str], Field(max_length=1024)]  # base64


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class OllamaCall(Body):
    """The fields of every request to the model."""

    model: str = Field(min_length=1)
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None  # the model stays loaded however long is asked

    @property
    def num_ctx(self) -> int | None:
        return None if self.options is None else self.options.num_ctx

    def check_stays(self) -> None:
        """Raises RequestError for a body without a prompt that asks to unload the model."""
        if self.keep_alive is not None and not re.search("[1-9]", str(self.keep_alive)):
            raise UnsupportedParameter(
                "{keep_alive} is 0 without a prompt, which asks to unload the model: this server "
                "keeps its model until it is stopped"
            )

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""


class OllamaBody(OllamaCall):
    """The fields that chat and generate share."""

    format: Format | None = None
    stream: bool | None = None  # null is true here
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives of each token are requested; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        predict = self.options.num_predict if self.options is not None else None
        if predict == 0:
            raise RequestError(
                "{options.num_predict} is 0: it must be at least 1, or -1 for no limit but the "
                "context"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "{top_logprobs} needs {logprobs} to be true: set it or leave {top_logprobs} out"
            )

    def sampling(self) -> dict[str, Any]:
        """The fields that a ChatRequest and a CompletionRequest share."""
        options = {} if self.options is None else self.options.sampling()
        fields = {"model": self.model, "stream": self.streams, **options}
        if isinstance(self.format, dict):
            fields["structured_outputs"] = {"json": self.format}
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields


class OllamaChatBody(OllamaBody):
    messages: (
        Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages or ()):
            if message.content is None and not message.tool_calls and not message.images:
                raise MissingParameter(
                    "{} is required: add it", FieldPath("messages", index, "content")
                )


class OllamaGenerateBody(OllamaBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Images | None = None

    def check(self) -> None:
        super().check()
        for name in ("suffix", "raw"):
            for other in ("system", "think"):
                if getattr(self, name) and getattr(self, other):
                    raise RequestError(
                        "{} and {} exclude each other, because the text goes to the model as it "
                        "is: leave one of them out",
                        (FieldPath(name), FieldPath(other)),
                        param=FieldPath(other),
                    )
            if getattr(self, name) and self.images:
                raise RequestError(
                    "{} and {} exclude each other, because the text goes to the model as it is: "
                    "leave one of them out",
                    (FieldPath(name), FieldPath("images")),
                    param=FieldPath("images"),
                )


class ShowBody(Body):
    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None
