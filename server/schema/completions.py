"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from server.errors import RequestError
from server.schema.base import WRONG_KIND, Unsupported
from server.schema.sampling import LATER, UNSUPPORTED, SamplingBody

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Tokens = Annotated[list[int], Field(min_length=1)]


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list) or not value:
        return "~texts" if isinstance(value, list) else None
    first: object = value[0]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(first, str):
        return "~texts"
    return "~token_lists" if isinstance(first, list) else "~tokens"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], Field(min_length=1, max_length=1024), Tag("~texts")]
    | Annotated[Tokens, Tag("~tokens")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=1024), Tag("~token_lists")],
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
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]

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
