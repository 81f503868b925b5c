"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field, Tag

from server.apis.openai.sampling_schema import UNSUPPORTED, SamplingBody
from server.errors import RequestError
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


def list_of_prompts(prompt: Prompt) -> list[str] | list[list[int]]:
    """Each one a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    return cast("list[str] | list[list[int]]", prompt)


def path_of_prompt(field: str, prompt: Prompt, index: int) -> str:
    """The path of entry `index` of list_of_prompts(prompt), where `prompt` is a field's value."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return field if is_one else f"{field}[{index}]"


class CompletionRequest(SamplingBody):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=20)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        return list_of_prompts(self.prompt)

    def path(self, index: int) -> str:
        """The field that holds entry `index` of `prompts`."""
        return path_of_prompt("prompt", self.prompt, index)

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
        self._check_best_of()
        self._check_suffix()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "`max_tokens` is 0: it must be at least 1 unless `echo` is true",
                param="max_tokens",
            )

    def _check_best_of(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise RequestError(
                f"`best_of` is {self.best_of}: it must be at least `n`, here {n}", param="best_of"
            )
        if self.stream and self.copies > n:
            raise RequestError(
                "`best_of` cannot be streamed, because all completions are compared first: set "
                "`stream` to false",
                param="best_of",
            )

    def _check_suffix(self) -> None:
        if not self.suffix:
            return
        if not isinstance(self.prompts()[0], str):
            raise RequestError(
                "`suffix` needs a `prompt` of text, not of token ids: send the text", param="suffix"
            )
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"`suffix` and `{name}` exclude each other: leave one of them out",
                    param="suffix",
                )


COMPLETION_UNSUPPORTED: dict[str, Unsupported] = {
    name: entry for name, entry in UNSUPPORTED.items() if name not in CompletionRequest.model_fields
} | {
    "prompt_embeds": Unsupported("send text or token ids"),
    "max_completion_tokens": Unsupported("use `max_tokens`"),
    "top_logprobs": Unsupported("set `logprobs` to the number of alternatives"),
}
