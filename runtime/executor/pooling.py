"""Pooling: the hidden states of a prompt -> its embedding.

A prompt is prefilled in chunks.  The sum over earlier chunks is kept in float32 on the device; the
embedding is an output of the step that prefills the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.messages import PoolingParams
from runtime.scheduler.batch import Batch, Int64Array, NewRow

SHORTEST = 1e-12  # norm: an embedding of zeros stays zero


class PooledPrompt:
    """The pooling of a partly prefilled prompt in a slot."""

    def __init__(self, pooling_params: PoolingParams, length: int) -> None:
        self.length = length
        self.needs_all = (
            pooling_params.kind == "mean"
        )  # hidden states of all tokens, not of the last alone
        self._pooling_params = pooling_params
        self._sum: Tensor | None = None  # [hidden] float32, of earlier chunks

    def take(self, hidden: Tensor, *, last: bool) -> Tensor | None:
        """Add the next chunk's hidden states [T, hidden]; the last one returns the embedding,
        [dimensions] float32."""
        if self.needs_all:
            total = hidden.sum(0, dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum + total
            embedding = self._sum / self.length
        else:
            embedding = hidden[-1].to(torch.float32)
        return self._finished(embedding) if last else None

    def _finished(self, embedding: Tensor) -> Tensor:
        if self._pooling_params.dimensions:
            embedding = embedding[: self._pooling_params.dimensions]
        if self._pooling_params.normalize:
            embedding = embedding / embedding.norm().clamp_min(SHORTEST)
        return embedding


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Embeddings of some rows of a batch, concatenated in `flat` [sum(sizes)] float32."""

    rows: list[int]
    sizes: list[int]
    flat: Tensor

    def arrived(self, flat: Tensor) -> Iterator[tuple[int, bytes, bool]]:
        """From `flat` on the host: row, little-endian bytes of the embedding, if all are finite."""
        for row, embedding in zip(self.rows, flat.split(self.sizes), strict=True):
            yield row, embedding.numpy().astype("<f4").tobytes(), bool(embedding.isfinite().all())


class PoolingStates:
    """The pooling state of all slots whose request is for an embedding."""

    def __init__(self) -> None:
        self._prompts: dict[int, PooledPrompt] = {}  # by slot

    def reset(self, row: NewRow) -> None:
        """Reset the slot for a new sequence."""
        self._prompts.pop(row.slot, None)
        if row.params.pooling is not None:
            self._prompts[row.slot] = PooledPrompt(row.params.pooling, row.prompt_len)

    def need_all(self, slots: Int64Array) -> bool:
        """Whether a prompt in one of the slots needs the hidden states of all its tokens.

        An aborted prompt stays in its slot until another sequence moves in.
        """
        needing = [slot for slot, prompt in self._prompts.items() if prompt.needs_all]
        return bool(needing) and bool(np.isin(needing, slots).any())

    def take(self, batch: Batch, hidden: Tensor, *, all_hidden_states: bool) -> PooledRows | None:
        """Pool the hidden states of the batch's tokens.  None if no embedding is complete.

        hidden  [T, hidden] of all tokens if all_hidden_states, else [B, hidden] of each row's last
                one
        """
        if not self._prompts:
            return None
        rows: list[int] = []
        embeddings: list[Tensor] = []
        end = 0
        columns = np.stack([batch.slots, batch.starts, batch.q_lens], axis=1).tolist()
        for row, (slot, start, q_len) in enumerate(columns):
            end += q_len
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            last = start + q_len == prompt.length
            states = hidden[end - q_len : end] if all_hidden_states else hidden[row : row + 1]
            embedding = prompt.take(states, last=last)
            if embedding is not None:
                del self._prompts[slot]
                rows.append(row)
                embeddings.append(embedding)
        if not rows:
            return None
        return PooledRows(rows, [len(embedding) for embedding in embeddings], torch.cat(embeddings))
