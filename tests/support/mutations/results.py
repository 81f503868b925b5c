"""Mistakes with the results of a step."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

import runtime.scheduler.commit
from runtime.messages import RequestOutput
from runtime.scheduler.batch import LAST, ModelRunnerOutput
from runtime.scheduler.commit import Committer, TokenColumns
from runtime.scheduler.sequence import Sequence


def parts_of_prompts_always_usable(true: Callable[..., bool]) -> Callable[..., bool]:
    def note(
        self: Committer, sequence: Sequence, index: int, model_output: ModelRunnerOutput
    ) -> bool:
        return model_output.tokens[index] != LAST and true(self, sequence, index, model_output)

    return note


def min_tokens_forgotten(true: Callable[..., object]) -> Callable[..., object]:
    def end(sequence: Sequence, token: int) -> object:
        sequence.prompt_len += 1
        ended = true(sequence, token)
        sequence.prompt_len -= 1
        return ended

    return end


def stop_in_the_last_token_alone(true: Callable[..., object]) -> Callable[..., object]:
    def append(self: Committer, sequence: Sequence, tokens: list[int], *rest: object) -> object:
        stop_ids, sequence.stop_ids = sequence.stop_ids, sequence.stop_ids & set(tokens[-1:])
        output = true(self, sequence, tokens, *rest)
        sequence.stop_ids = stop_ids
        return output

    return append


def tokens_after_the_end(true: Callable[..., RequestOutput]) -> Callable[..., RequestOutput]:
    def append(
        self: Committer, sequence: Sequence, tokens: list[int], *rest: object
    ) -> RequestOutput:
        return structs.replace(true(self, sequence, tokens, *rest), tokens=tokens)

    return append


def logprobs_of_the_first_alone(true: Callable[..., object]) -> Callable[..., object]:
    def append(
        self: Committer, sequence: Sequence, tokens: list[int], logprobs: list[object] | None
    ) -> object:
        return true(self, sequence, tokens, None if logprobs is None else logprobs[:1])

    return append


def tokens_in_reverse(true: Callable[..., object]) -> Callable[..., object]:
    def commit(self: Committer, *outputs: object) -> TokenColumns:
        columns = true(self, *outputs)
        assert isinstance(columns, TokenColumns)
        return TokenColumns(*[column[::-1] for column in columns])

    return commit


def plain_tokens_twice(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *row, first_column=0: true(self, *row[:4], 0)


MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (Committer, "_record_details", parts_of_prompts_always_usable),
    (runtime.scheduler.commit, "_end", min_tokens_forgotten),
    (Committer, "commit", tokens_in_reverse),
    (Committer, "_commit_row", plain_tokens_twice),
    (Committer, "_append", stop_in_the_last_token_alone),
    (Committer, "_append", tokens_after_the_end),
    (Committer, "_append", logprobs_of_the_first_alone),
]
