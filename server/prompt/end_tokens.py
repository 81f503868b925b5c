"""The tokens that end an answer: those of a model's files, and those that end its turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct


class EndTokens(Struct, frozen=True):
    """The part of config.json and generation_config.json with the tokens that end an answer."""

    eos_token_id: int | list[int] | None = None

    def ids(self) -> list[int]:
        found = self.eos_token_id
        return [found] if isinstance(found, int) else found or []


@dataclass(frozen=True)
class TurnEnds:
    """How the turns of a family end, whose files are not right in all copies of its models."""

    template_has: tuple[str, ...]  # all of these words
    ends: tuple[str, ...]  # which all must be tokens
    goes_on: tuple[str, ...] = ()  # ends a part of an answer only


TURN_ENDS = (
    # gpt-oss: copies from its first days do not name <|call|>, behind which the model would go on
    # to write the function's result.  <|end|> stands behind the reasoning, too.
    TurnEnds(("<|channel|>", "<|call|>"), ("<|return|>", "<|call|>"), ("<|end|>",)),
    # Gemma 2: many copies name <eos> only.
    TurnEnds(("<end_of_turn>",), ("<end_of_turn>",)),
)


def end_ids(
    files: Iterable[EndTokens],
    eos_word: str | None,
    vocabulary: Mapping[str, int],
    template: str | None,
) -> tuple[int, ...]:
    """The ids of all tokens that end an answer, sorted.

    files     generation_config.json and config.json
    eos_word  eos_token of tokenizer_config.json
    template  the chat template's source
    """
    words = set[str]() if eos_word is None else {eos_word}
    ids = {id for file in files for id in file.ids()}
    for family in TURN_ENDS:
        named = template is not None and all(word in template for word in family.template_has)
        if named and all(word in vocabulary for word in family.ends):
            words.update(family.ends)
            words.difference_update(family.goes_on)
            ids.difference_update(vocabulary[word] for word in family.goes_on if word in vocabulary)
    return tuple(sorted(ids | {vocabulary[word] for word in words if word in vocabulary}))
