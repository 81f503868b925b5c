"""What a request is told: the Outputs of a sequence, its first and its last among them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.messages import FinishReason, Output, TokenLogprob
from runtime.scheduler.batch import Ints
from runtime.scheduler.sequence import Sequence


class News(NamedTuple):
    """What a step has to tell: one token for each of `ids`, and all that is more than that."""

    ids: Ints
    tokens: NDArray[np.int32]
    clients: Ints  # who asked for them
    outputs: list[Output]

    def all(self) -> list[Output]:
        columns = zip(self.ids.tolist(), self.tokens.tolist(), strict=True)
        return [Output(id, [token]) for id, token in columns] + self.outputs


def next_output(sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
    """The Output for `token`, just appended to the sequence; with `finish` if it ends it."""
    finish: FinishReason | None = None
    stop_id: int | None = None
    min_tokens = sequence.request.params.min_tokens
    if token in sequence.stop_ids and len(sequence.tokens) - sequence.prompt_len > min_tokens:
        finish, stop_id = "stop", token
    elif len(sequence.tokens) >= sequence.limit:
        finish = "length"
    logprobs = None if logprob is None else [logprob]
    output = Output(sequence.request_id, [token], finish, stop_id, logprobs)
    return output if sequence.announced else _announce(sequence, output, _prompt_scores(sequence))


def ending(sequence: Sequence, finish: FinishReason, *, error: str | None = None) -> Output:
    """The last Output of a sequence that ends between two tokens."""
    output = Output(sequence.request_id, [], finish, error=error)
    return output if sequence.announced else _announce(sequence, output, None)


def explained(sequence: Sequence, output: Output, mean_batch: float) -> Output:
    """The last Output also tells what the whole request met."""
    return structs.replace(output, preemptions=sequence.preemptions, mean_batch=mean_batch)


def pooled(sequence: Sequence, vector: bytes) -> Output:
    """The one Output of a sequence that wants the vector of its prompt."""
    return _announce(sequence, Output(sequence.request_id, [], "stop", vector=vector), None)


def _announce(
    sequence: Sequence, output: Output, scores: list[TokenLogprob | None] | None
) -> Output:
    """The first Output also tells what happened before it."""
    sequence.announced = True
    sequence.prompt_scores = None
    return structs.replace(
        output, prompt_logprobs=scores, cached=sequence.cached, started=sequence.started
    )


def _prompt_scores(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """One entry a prompt token, None for the first; None if they were not asked for."""
    if sequence.request.params.prompt_logprobs is None:
        return None
    # A prompt of one token has nothing to score, so the executor had nothing to report.
    scores = sequence.prompt_scores or [None]
    if len(scores) != sequence.prompt_len:
        raise ValueError(f"{len(scores)} of {sequence.prompt_len} prompt tokens were scored")
    return scores
