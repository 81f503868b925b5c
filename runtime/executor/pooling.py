"""Pooling: the hidden states of a prompt -> one vector that stands for it.

The runner feeds a prompt in chunks.  What a later chunk needs of the earlier ones is kept in
float32 on the device; the vector leaves with the step that feeds the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.messages import Pooling
from runtime.scheduler.batch import Batch, Ints, NewRow

SHORTEST = 1e-12  # a vector of length 0 stays what it is


class Prompt:
    """One prompt that is under way in a slot."""

    def __init__(self, wanted: Pooling, length: int) -> None:
        self.length = length
        self.needs_all = wanted.kind == "mean"  # the states of all tokens, not of the last alone
        self._wanted = wanted
        self._sum: Tensor | None = None  # [hidden] float32, of the chunks before

    def take(self, hidden: Tensor, *, last: bool) -> Tensor | None:
        """The next chunk's states [T, hidden]; with the last one comes the vector, in float32."""
        if self.needs_all:
            total = hidden.sum(0, dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum + total
            vector = self._sum / self.length
        else:
            vector = hidden[-1].to(torch.float32)
        return self._finished(vector) if last else None

    def _finished(self, vector: Tensor) -> Tensor:
        if self._wanted.dimensions:
            vector = vector[: self._wanted.dimensions]
        if self._wanted.normalize:
            vector = vector / vector.norm().clamp_min(SHORTEST)
        return vector


@dataclass(frozen=True, slots=True)
class Pooled:
    """Vectors of some rows of a batch, one behind the other in `flat` [sum(sizes)] float32."""

    rows: list[int]
    sizes: list[int]
    flat: Tensor

    def arrived(self, flat: Tensor) -> Iterator[tuple[int, bytes, bool]]:
        """Of each row, from `flat` on the host: its little-endian bytes, and if all are finite."""
        for row, vector in zip(self.rows, flat.split(self.sizes), strict=True):
            yield row, vector.numpy().astype("<f4").tobytes(), bool(vector.isfinite().all())


class Pools:
    """The prompts in all slots that want a vector."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}  # by slot

    def start_over(self, row: NewRow) -> None:
        """A new sequence is in the slot."""
        self._prompts.pop(row.slot, None)
        if row.params.pooling is not None:
            self._prompts[row.slot] = Prompt(row.params.pooling, row.prompt_len)

    def need_all(self, slots: Ints) -> bool:
        """Whether a prompt in one of the slots needs the states of all its tokens.

        A prompt that was given up half-way lies in its slot until another sequence moves in.
        """
        wanted = [slot for slot, prompt in self._prompts.items() if prompt.needs_all]
        return bool(wanted) and bool(np.isin(wanted, slots).any())

    def take(self, batch: Batch, hidden: Tensor, *, every_state: bool) -> Pooled | None:
        """Learn the states of the batch's tokens.  None if no vector is complete.

        hidden  [T, hidden] of all tokens if every_state, else [B, hidden] of each row's last one
        """
        if not self._prompts:
            return None
        rows: list[int] = []
        vectors: list[Tensor] = []
        end = 0
        columns = np.stack([batch.slots, batch.starts, batch.q_lens], axis=1).tolist()
        for row, (slot, start, q_len) in enumerate(columns):
            end += q_len
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            last = start + q_len == prompt.length
            states = hidden[end - q_len : end] if every_state else hidden[row : row + 1]
            vector = prompt.take(states, last=last)
            if vector is not None:
                del self._prompts[slot]
                rows.append(row)
                vectors.append(vector)
        if not rows:
            return None
        return Pooled(rows, [len(vector) for vector in vectors], torch.cat(vectors))
