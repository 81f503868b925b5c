"""Log-probabilities of prompt tokens, computed from hidden states while the prompt is prefilled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.executor.slots import SequenceSlots
from runtime.executor.transfers import upload
from runtime.messages import TokenLogprob
from runtime.sampling.logprobs import LogprobsTensors, score, token_logprobs
from runtime.scheduler.batch import Batch, Int64Array

CHUNK_TOKENS = 128  # prompt tokens scored at a time: logits of a long prompt would be gigabytes


@dataclass(frozen=True, slots=True)
class PromptLogprobsTensors:
    """Log-probabilities of the prompt tokens that one row prefills, in chunks."""

    row: int
    width: int
    chunks: list[LogprobsTensors]

    def tensors(self) -> list[Tensor]:
        return [tensor for chunk in self.chunks for tensor in chunk.tensors()]


def score_prompts(
    batch: Batch, hidden: Tensor, slots: SequenceSlots, logits: Callable[[Tensor], Tensor]
) -> list[PromptLogprobsTensors]:
    """Log-probabilities of the prompt tokens that the batch prefills, for rows that request them.

    hidden [T, hidden] are the hidden states of the batch's tokens; logits computes their logits.
    """
    requested = slots.params["prompt_logprobs"][batch.slots]
    scores: list[PromptLogprobsTensors] = []
    ends = np.cumsum(batch.q_lens)
    for row in np.flatnonzero(requested >= 0).tolist():
        slot, q_len = int(batch.slots[row]), int(batch.q_lens[row])
        prefilled = min(q_len, int(slots.params["prompt_len"][slot] - batch.starts[row]))
        if prefilled > 0:
            first, width = int(ends[row]) - q_len, int(requested[row])
            tokens, states = batch.tokens[first:][:prefilled], hidden[first:][:prefilled]
            chunks = _score(slot, states, tokens, width, slots, logits)
            scores.append(PromptLogprobsTensors(row, width, chunks))
    return scores


def _score(
    slot: int,
    states: Tensor,
    tokens: Int64Array,
    width: int,
    slots: SequenceSlots,
    logits: Callable[[Tensor], Tensor],
) -> list[LogprobsTensors]:
    """Score each token by the hidden state before it, the first by that of the last chunk."""
    before, slots.before[slot] = slots.before[slot], states[-1:].clone()
    if before is not None:
        states = torch.cat([before, states])
    else:
        tokens = tokens[1:]  # nothing comes before a prompt's first token
    if not len(tokens):
        return []
    targets = upload(tokens, slots.device)
    return [
        score(
            logits(states[first : first + CHUNK_TOKENS][: len(tokens) - first]).float(),
            targets[first : first + CHUNK_TOKENS],
            width,
        )
        for first in range(0, len(tokens), CHUNK_TOKENS)
    ]


def prompt_logprobs(
    scores: list[PromptLogprobsTensors], arrived: list[Tensor], num_rows: int
) -> list[list[TokenLogprob] | None] | None:
    """`scores` by row of the batch, from their tensors on the host; None if no row requests any."""
    if not scores:
        return None
    rows: list[list[TokenLogprob] | None] = [None] * num_rows
    for scored in scores:
        found: list[TokenLogprob] = []
        for _ in scored.chunks:
            chunk, arrived = arrived[:4], arrived[4:]
            found += token_logprobs(chunk, [scored.width] * len(chunk[0]))
        rows[scored.row] = found
    return rows
