"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Discriminator, Field, Tag

from server.errors import RequestError
from server.schema.base import WRONG_KIND, Unsupported, items_of, kind_of
from server.schema.sampling import LATER, UNSUPPORTED, SamplingBody

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def _prompt_kind(value: object) -> str | None:
    kind = kind_of(value)
    if kind != "array":
        return "~text" if kind == "string" else None
    match items_of(value)[:1]:  # the first item tells what the others have to be
        case [] | [str()]:
            return "~texts"
        case [list()]:
            return "~token_lists"
        case _:
            return "~tokens"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024), Tag("~texts")]
    | Annotated[Tokens, Tag("~tokens")]
    | Annotated[
        list[Tokens], Field(fail_fast=True, min_length=1, max_length=1024), Tag("~token_lists")
    ],
    Discriminator(
        _prompt_kind,
        custom_error_type=WRONG_KIND,
        custom_error_message="a string, strings, token ids or lists of token ids",
    ),
]


class CompletionRequest(SamplingBody):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    def limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "`max_tokens` is 0: it must be at least 1 unless `echo` is true",
                param="max_tokens",
            )


COMPLETION_UNSUPPORTED: dict[str, Unsupported] = UNSUPPORTED | {
    "suffix": Unsupported("the model cannot fill a gap; put everything into `prompt`"),
    "prompt_embeds": Unsupported("send text or token ids"),
    "response_format": Unsupported(LATER, {"type": "text"}),
    "max_completion_tokens": Unsupported("use `max_tokens`"),
    "top_logprobs": Unsupported("set `logprobs` to the number of alternatives"),
}
