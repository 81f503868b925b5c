"""PromptOutputs: what a prompt's hidden states give besides tokens, while it is prefilled.

    log-probabilities   of the prompt's tokens, each by the hidden state before it
    embeddings          of the last hidden state, or of the mean of all

A prompt is prefilled in chunks.  The last hidden state of a chunk, or the sum over earlier chunks
in float32, is kept on the device; an embedding is an output of the step with the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runtime.executor.transfers import upload
from runtime.messages import PoolingParams, TokenLogprob
from runtime.sampling.logprobs import LogprobsTensors, score, token_logprobs
from runtime.scheduler.batch import Batch, Int64Array, NewRow

MIN_NORM = 1e-12  # an embedding of zeros stays zero
CHUNK_TOKENS = 128  # prompt tokens scored at a time: logits of a long prompt would be gigabytes

ComputeLogits = Callable[[Tensor], Tensor]  # [N, hidden] -> [N, vocab]


@dataclass(slots=True)
class ScoredPrompt:
    """A prompt whose tokens are scored, with `width` alternatives each."""

    length: int
    width: int
    before: Tensor | None = None  # [1, hidden]: the hidden state before the next token

    def needs_all(self, start: int) -> bool:
        """Whether it needs the hidden states of all its tokens from position `start` on."""
        return start < self.length

    def score(self, states: Tensor, tokens: Int64Array, logits: ComputeLogits) -> PromptScores:
        """Score the next tokens [T], whose hidden states are [T, hidden]."""
        before, self.before = self.before, states[-1:].clone()
        if before is not None:
            states = torch.cat([before, states])
        else:
            tokens = tokens[1:]  # nothing comes before a prompt's first token
        if not len(tokens):
            return []
        targets = upload(tokens, states.device)
        return [
            score(
                logits(states[first : first + CHUNK_TOKENS][: len(tokens) - first]).float(),
                targets[first : first + CHUNK_TOKENS],
                self.width,
            )
            for first in range(0, len(tokens), CHUNK_TOKENS)
        ]


PromptScores = list[LogprobsTensors]  # of the prompt tokens that one row prefills, in chunks


@dataclass(slots=True)
class PooledPrompt:
    """A prompt that becomes an embedding."""

    params: PoolingParams
    length: int
    total: Tensor | None = None  # [hidden] float32: the sum over earlier chunks

    def needs_all(self, start: int) -> bool:
        """Whether it needs the hidden states of all its tokens from position `start` on."""
        return self.params.kind == "mean"

    def take(self, hidden: Tensor, *, last: bool) -> Tensor | None:
        """Add the next chunk's hidden states [T, hidden]; the last one returns the embedding,
        [dimensions] float32."""
        if self.params.kind == "mean":
            total = hidden.sum(0, dtype=torch.float32)
            self.total = total if self.total is None else self.total + total
            embedding = self.total / self.length
        else:
            embedding = hidden[-1].to(torch.float32)
        return self._finished(embedding) if last else None

    def _finished(self, embedding: Tensor) -> Tensor:
        if self.params.dimensions:
            embedding = embedding[: self.params.dimensions]
        if self.params.normalize:
            embedding = embedding / embedding.norm().clamp_min(MIN_NORM)
        return embedding


@dataclass(slots=True)
class StepPromptOutputs:
    """The prompt outputs of one step, by row of its batch, on the device."""

    scores: dict[int, PromptScores] = field(default_factory=dict[int, PromptScores])
    embeddings: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # float32

    def tensors(self) -> list[Tensor]:
        """What has to be copied to the host."""
        chunks = [chunk for chunks in self.scores.values() for chunk in chunks]
        flat = [torch.cat([*self.embeddings.values()])] if self.embeddings else []
        return [tensor for chunk in chunks for tensor in chunk.tensors()] + flat

    def logprobs(
        self, arrived: Iterator[Tensor], num_rows: int
    ) -> list[list[TokenLogprob] | None] | None:
        """By row, from the host copies of tensors(); None if no row requests any."""
        if not self.scores:
            return None
        rows: list[list[TokenLogprob] | None] = [None] * num_rows
        for row, chunks in self.scores.items():
            rows[row] = found = list[TokenLogprob]()
            for chunk in chunks:
                count, width = chunk.top_ids.shape
                found += token_logprobs([next(arrived) for _ in range(4)], [width] * count)
        return rows

    def pooled(self, arrived: Iterator[Tensor]) -> Iterator[tuple[int, bytes, bool]]:
        """Row, little-endian float32 bytes of its embedding, and if all are finite.

        After logprobs(), with the same iterator.
        """
        sizes = [len(embedding) for embedding in self.embeddings.values()]
        if sizes:
            for row, embedding in zip(self.embeddings, next(arrived).split(sizes), strict=True):
                finite = bool(embedding.isfinite().all())
                yield row, embedding.numpy().astype("<f4").tobytes(), finite


class PromptOutputs:
    """The prompts in all slots that give more than tokens."""

    def __init__(self) -> None:
        self.prompts: dict[int, ScoredPrompt | PooledPrompt] = {}  # by slot

    def reset(self, row: NewRow) -> None:
        """Reset the slot for a new sequence."""
        self.prompts.pop(row.slot, None)
        params = row.params
        if params.pooling is not None:
            self.prompts[row.slot] = PooledPrompt(params.pooling, row.prompt_len)
        elif params.prompt_logprobs is not None:
            self.prompts[row.slot] = ScoredPrompt(row.prompt_len, params.prompt_logprobs)

    def needs_all_hidden_states(self, batch: Batch) -> bool:
        """Whether a prompt of the batch, before or after reset(), needs those of all its tokens.

        A slot's prompt stays here until another sequence moves in.
        """
        new_slots = {row.slot for row in batch.new_rows}
        return any(
            row.params.prompt_logprobs is not None
            or (row.params.pooling is not None and row.params.pooling.kind == "mean")
            for row in batch.new_rows
        ) or any(
            self.prompts[slot].needs_all(start)
            for slot, start in zip(batch.slots.tolist(), batch.starts.tolist(), strict=True)
            if slot in self.prompts and slot not in new_slots
        )

    def compute(
        self, batch: Batch, hidden: Tensor, logits: ComputeLogits, *, all_hidden_states: bool
    ) -> StepPromptOutputs | None:
        """The outputs of the batch's prompts; None if it has none.

        hidden  [T, hidden] of all tokens if all_hidden_states, else [B, hidden] of each row's last
                one
        """
        outputs, end = StepPromptOutputs(), 0
        columns = np.stack([batch.slots, batch.starts, batch.q_lens], axis=1).tolist()
        for row, (slot, start, q_len) in enumerate(columns):
            first, end = end, end + q_len
            prompt = self.prompts.get(slot)
            if isinstance(prompt, PooledPrompt):
                states = hidden[first:end] if all_hidden_states else hidden[row : row + 1]
                embedding = prompt.take(states, last=start + q_len == prompt.length)
                if embedding is not None:
                    outputs.embeddings[row] = embedding
                    del self.prompts[slot]
            elif prompt is not None and prompt.needs_all(start):
                stop = first + min(q_len, prompt.length - start)
                states, tokens = hidden[first:stop], batch.tokens[first:stop]
                outputs.scores[row] = prompt.score(states, tokens, logits)
        return outputs if outputs.scores or outputs.embeddings else None
