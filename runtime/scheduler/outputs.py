"""The RequestOutputs of a sequence: its tokens, what its first and last output add."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.messages import FinishReason, RequestOutput, TokenLogprob
from runtime.scheduler.batch import Int64Array
from runtime.scheduler.sequence import Sequence


class EngineOutputs(NamedTuple):
    """All outputs of a step: one token for each of `ids`, and the outputs that say more."""

    ids: Int64Array
    tokens: NDArray[np.int32]
    clients: Int64Array  # index of the API process of each of `ids`
    outputs: list[RequestOutput]

    def all(self) -> list[RequestOutput]:
        columns = zip(self.ids.tolist(), self.tokens.tolist(), strict=True)
        return [RequestOutput(id, [token]) for id, token in columns] + self.outputs


def next_output(sequence: Sequence, token: int, logprob: TokenLogprob | None) -> RequestOutput:
    """The output for `token`, just appended to the sequence; `finish` is set if it ends there."""
    finish: FinishReason | None = None
    stop_id: int | None = None
    min_tokens = sequence.request.params.min_tokens
    if token in sequence.stop_ids and len(sequence.tokens) - sequence.prompt_len > min_tokens:
        finish, stop_id = "stop", token
    elif len(sequence.tokens) >= sequence.max_len:
        finish = "length"
    logprobs = None if logprob is None else [logprob]
    output = RequestOutput(sequence.request_id, [token], finish, stop_id, logprobs)
    return (
        output
        if sequence.first_output_sent
        else _as_first_output(sequence, output, _prompt_scores(sequence))
    )


def finish_output(
    sequence: Sequence, finish: FinishReason, *, error: str | None = None
) -> RequestOutput:
    """The last output of a sequence that ends without a new token."""
    output = RequestOutput(sequence.request_id, [], finish, error=error)
    return output if sequence.first_output_sent else _as_first_output(sequence, output, None)


def with_request_stats(
    sequence: Sequence, output: RequestOutput, mean_batch: float
) -> RequestOutput:
    """The last output, with the statistics of the whole request."""
    return structs.replace(output, preemptions=sequence.preemptions, mean_batch=mean_batch)


def pooled_output(sequence: Sequence, embedding: bytes) -> RequestOutput:
    """The only output of a sequence whose prompt is pooled."""
    return _as_first_output(
        sequence, RequestOutput(sequence.request_id, [], "stop", embedding=embedding), None
    )


def _as_first_output(
    sequence: Sequence, output: RequestOutput, scores: list[TokenLogprob | None] | None
) -> RequestOutput:
    """The first output, with prompt logprobs, cached tokens and the time of admission."""
    sequence.first_output_sent = True
    sequence.prompt_scores = None
    return structs.replace(
        output,
        prompt_logprobs=scores,
        cached=sequence.num_cached_tokens,
        started=sequence.first_scheduled_at,
    )


def _prompt_scores(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """One entry a prompt token, None for the first; None if they were not asked for."""
    if sequence.request.params.prompt_logprobs is None:
        return None
    # A prompt of one token has no token to score, so the executor reported none.
    scores = sequence.prompt_scores or [None]
    if len(scores) != sequence.prompt_len:
        raise ValueError(f"{len(scores)} of {sequence.prompt_len} prompt tokens were scored")
    return scores
