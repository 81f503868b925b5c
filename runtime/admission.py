"""Who may wait, and who is next."""

from __future__ import annotations

import heapq
from itertools import chain

from runtime.config import Resolved
from runtime.messages import Request
from runtime.sequence import Sequence


class WaitingLine:
    """Sequences by rank.  Those that end while they wait are skipped, not searched for."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def head(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].finish is not None:
            heapq.heappop(heap)
            self._num_ended -= 1
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Take out what head() returned."""
        heapq.heappop(self._heap)

    def note_end(self) -> None:
        """A sequence that waits has got its `finish`.  Sweep when half of the line has."""
        self._num_ended += 1
        if self._num_ended * 2 > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[1].finish is None]
            heapq.heapify(self._heap)
            self._num_ended = 0


def refusal(request: Request, resolved: Resolved, vocab_size: int) -> str | None:
    """Why this request could never run, or would harm others if it did; None if it can.

    The server has checked the same before: this guards the engine, not the caller's comfort.
    """
    tokens, params = request.tokens, request.params
    if not tokens:
        return "the prompt has no tokens: send at least one"
    pooled = params.pooling is not None
    if params.max_tokens != 0 if pooled else params.max_tokens < 1:
        return f"`max_tokens` is {params.max_tokens}: it must be {'0' if pooled else 'at least 1'}"
    for name, ids in (
        ("prompt", tokens),
        ("stop_ids", params.stop_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_ids", params.allowed_ids),
        ("logprob_ids", params.logprob_ids),
        ("banned", list(chain.from_iterable(params.banned))),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            return (
                f"`{name}` contains {wrong}, not a token id of this model: "
                f"ids run from 0 to {vocab_size - 1}"
            )
    if len(tokens) + (not pooled) > resolved.max_model_len:
        answer = "" if pooled else " with at least one token of answer"
        return (
            f"prompt has {len(tokens)} tokens, the maximum context length is "
            f"{resolved.max_model_len}{answer}: shorten the prompt"
        )
    # Nothing reads the last token of an answer.
    longest = min(len(tokens) + params.max_tokens, resolved.max_model_len) - (not pooled)
    capacity = resolved.num_pages * resolved.page_size
    if longest > capacity:
        return (
            f"prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}: the KV cache "
            f"holds {capacity} tokens: shorten the prompt or lower max_tokens"
        )
    return None
