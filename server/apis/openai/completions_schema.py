"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field, Tag

from server.apis.openai.sampling_schema import UNSUPPORTED, SamplingBody
from server.errors import FieldPath, RequestError
from server.http.validation import Unsupported, items_of, kind_of, tagged_union

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def prompt_tag(value: object) -> str | None:
    kind = kind_of(value)
    if kind != "array":
        return "~text" if kind == "string" else None
    match items_of(value)[:1]:  # the others have to be of the first item's type
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
    tagged_union(prompt_tag, "a string, strings, token ids or lists of token ids"),
]


Prompts = dict[FieldPath, str | list[int]]


def prompts_by_path(field: str, value: Prompt) -> Prompts:
    """The texts or token ids of a field by their paths."""
    if isinstance(value, str):
        return {FieldPath(field): value}
    if isinstance(value[0], int):
        return {FieldPath(field): cast("list[int]", value)}
    prompts = cast("list[str] | list[list[int]]", value)
    return {FieldPath(field, index): prompt for index, prompt in enumerate(prompts)}


class CompletionRequest(SamplingBody):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=20)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> Prompts:
        """Path -> text or token ids."""
        return prompts_by_path("prompt", self.prompt)

    def limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def copies(self) -> int:
        """Completions to generate for each prompt; the `n` best are returned."""
        return self.best_of or self.n or 1

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        self.check_sampling()
        self.check_reported("logprobs", self.logprobs)
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise RequestError(
                "{best_of} is {}: it must be at least {n}, here {}", (self.best_of, n)
            )
        if self.stream and self.copies > n:
            raise RequestError(
                "{best_of} cannot be streamed, because all completions are compared first: set "
                "{stream} to false"
            )
        if self.suffix and prompt_tag(self.prompt) not in ("~text", "~texts"):
            raise RequestError("{suffix} needs a {prompt} of text, not of token ids: send the text")
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise RequestError(
                    "{suffix} and {} exclude each other: leave one of them out", FieldPath(name)
                )
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("{max_tokens} is 0: it must be at least 1 unless {echo} is true")


COMPLETION_UNSUPPORTED: dict[str, Unsupported] = {
    name: entry for name, entry in UNSUPPORTED.items() if name not in CompletionRequest.model_fields
} | {
    "prompt_embeds": Unsupported("send text or token ids"),
    "max_completion_tokens": Unsupported("use `max_tokens`"),
    "top_logprobs": Unsupported("set `logprobs` to the number of alternatives"),
}
