"""Scores of prompt tokens, made of the hidden states before them while the prompt is fed."""

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
    """Scores of the prompt tokens that one row fed, in pieces."""

    row: int
    width: int
    chunks: list[LogprobsTensors]

    def tensors(self) -> list[Tensor]:
        return [tensor for chunk in self.chunks for tensor in chunk.tensors()]


def score_prompts(
    batch: Batch, hidden: Tensor, slots: SequenceSlots, logits: Callable[[Tensor], Tensor]
) -> list[PromptLogprobsTensors]:
    """Scores of the prompt tokens that the batch feeds, for the rows that want them.

    hidden [T, hidden] are the states of the batch's tokens; logits makes logits of such states.
    """
    wanted = slots.params["prompt_logprobs"][batch.slots]
    scores: list[PromptLogprobsTensors] = []
    ends = np.cumsum(batch.q_lens)
    for row in np.flatnonzero(wanted >= 0).tolist():
        slot, q_len = int(batch.slots[row]), int(batch.q_lens[row])
        fed = min(q_len, int(slots.params["prompt_len"][slot] - batch.starts[row]))
        if fed > 0:
            first, width = int(ends[row]) - q_len, int(wanted[row])
            tokens, states = batch.tokens[first : first + fed], hidden[first : first + fed]
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
    """What the tensors of `scores` held, by row of the batch; None if no row asked."""
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
