"""The parameters that chat and text completions share."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from server.apis.openai.response_format_schema import (
    LEGACY_GUIDED_FIELDS,
    ResponseFormat,
    StructuredOutputs,
    check_format,
)
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.http.validation import Body, Unsupported, by_kind, few_entries

INT64 = 2**63
BadWord = Annotated[str, Field(min_length=1, max_length=128)]
MAX_STOPS = 32
MAX_STOP_CHARS = 4096  # of all: the text of every token is compared with each of them
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopString, Tag("~one")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("~several")],
    by_kind("a string or an array of strings", string="~one", array="~several"),
]


def check_truncation(kept: int | None, side: str | None) -> None:
    """The rules between `truncate_prompt_tokens` and `truncation_side`.  Raises RequestError."""
    if kept == 0:
        raise RequestError(
            "{truncate_prompt_tokens} is 0: it must be at least 1, or -1 for as much as fits"
        )
    if side is not None and kept is None:
        raise RequestError(
            "{truncation_side} needs {truncate_prompt_tokens}: set it, or leave {truncation_side} "
            "out"
        )


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk
    include_obfuscation: bool | None = None  # padding against readers of packet sizes


class SamplingBody(Body):
    """null stands for "the default" in every field, as in OpenAI's API."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Stop | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    # The logits are divided by it: they would overflow with a smaller one.
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    logit_bias: Annotated[dict[str, float], BeforeValidator(few_entries(1024))] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=1024)] | None = None
    logprob_token_ids: Annotated[list[int], Field(min_length=1, max_length=128)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: token_id:7
    timings: bool | None = None  # of each choice, see server/generation/request_log.py
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def reported_ids(self) -> list[int]:
        """`logprob_token_ids`, each once."""
        return list(dict.fromkeys(self.logprob_token_ids or ()))

    def check_reported(self, name: str, logprobs: int | None) -> None:
        """The rules of what is reported of tokens.  Raises RequestError.

        logprobs  the number of alternatives that field `name` requests; None: no log-probabilities
        """
        for option in ("return_tokens_as_token_ids", "logprob_token_ids"):
            if getattr(self, option) and logprobs is None:
                raise RequestError(
                    "{} needs {logprobs}: set it or leave {} out",
                    (FieldPath(option), FieldPath(option)),
                )
        if self.logprob_token_ids and logprobs:
            raise RequestError(
                "{logprob_token_ids} takes the place of the likeliest tokens, of which {} asks "
                "for {}: set it to 0",
                (FieldPath(name), logprobs),
            )

    def check_sampling(self) -> None:
        """The rules between fields of every route.  Raises RequestError."""
        check_format(self.response_format, self.structured_outputs, self.allowed_token_ids)
        stop_chars = sum(map(len, self.stop_strings()))
        if stop_chars > MAX_STOP_CHARS:
            raise RequestError(
                "{stop} has {} characters in all: send at most {}", (stop_chars, MAX_STOP_CHARS)
            )
        check_truncation(self.truncate_prompt_tokens, self.truncation_side)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "{stream_options} is only allowed when {stream} is true: set it or leave "
                "{stream_options} out"
            )
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise UnsupportedParameter(
                "{stream_options.include_obfuscation} is not supported by this server: use false"
            )
        if self.continuous_usage and not self.include_usage:
            raise RequestError(
                "{stream_options.continuous_usage_stats} needs `include_usage` to be true: set it "
                "or leave `continuous_usage_stats` out"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("{prompt_logprobs} cannot be streamed: set {stream} to false")


LATER = "leave it out"
TOKEN_ID = re.compile("[0-9]{1,10}")

# Fields of OpenAI's API and of other servers that change the answer and that this one lacks.
UNSUPPORTED: dict[str, Unsupported] = LEGACY_GUIDED_FIELDS | {
    "best_of": Unsupported("ask for `n` completions and choose yourself", 1),
    "use_beam_search": Unsupported("use sampling", False),
    "length_penalty": Unsupported("it belongs to beam search", 1, 1.0),
    "spaces_between_special_tokens": Unsupported(LATER, True),
    "kv_transfer_params": Unsupported(LATER),
    "request_id": Unsupported("send the header `X-Request-Id`"),
    "rid": Unsupported("send the header `X-Request-Id`"),
    "session_id": Unsupported("every prefix is cached; leave it out"),
    "cache_prompt": Unsupported("every prefix is cached; use true", True),
    "extra_key": Unsupported("use `cache_salt`"),
    "return_prompt_text": Unsupported("use /tokenize, or `return_token_ids`", False),
    "return_hidden_states": Unsupported("use /v1/embeddings", False),
    "stop_regex": Unsupported("use `stop`, or `structured_outputs`"),
    "no_stop_trim": Unsupported("use `include_stop_str_in_output`", False),
    "min_new_tokens": Unsupported("use `min_tokens`", 0),
    "repeat_penalty": Unsupported("use `repetition_penalty`", 1, 1.0),
    "typical_p": Unsupported("use `top_p` or `min_p`", 1, 1.0),
    "mirostat": Unsupported("use `top_p` or `min_p`", 0),
    "repetition_detection": Unsupported("use `frequency_penalty`"),
    "stream_interval": Unsupported("every token is sent; use 1", 1),
    "lora_path": Unsupported("adapters are not served"),
    "vllm_xargs": Unsupported(LATER),
    "custom_logit_processor": Unsupported("use `logit_bias`"),
    "mm_processor_kwargs": Unsupported("images are processed as the model was trained"),
    "media_io_kwargs": Unsupported("images are processed as the model was trained"),
}


def token_biases(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """`logit_bias` with its keys as token ids.  Raises RequestError naming the wrong entry."""
    biases: dict[int, float] = {}
    for key, value in (bias or {}).items():
        token = int(key) if TOKEN_ID.fullmatch(key) else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                "{logit_bias} key {} is not a token id of this model: ids run from 0 to {}",
                (key[:40], vocab_size - 1),
            )
        if not -100 <= value <= 100:
            raise RequestError(
                "{logit_bias} of token {} is {:g}: it must be between -100 and 100", (token, value)
            )
        biases[token] = value
    return biases
