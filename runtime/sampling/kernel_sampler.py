"""KernelSampler: the sampler of a GPU, from sampling parameters to launches of its kernels.

Rows with nothing but filters and penalties are sampled by `sample` alone, which a captured step
does itself.  The others (DeferredRows) are sampled or scored right after it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.transfers import upload
from runtime.sampling.constrained_rows import ConstrainedRows, DeferredRows
from runtime.sampling.kernels.sample import sample
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.state import ROW_WORDS, SamplerState, is_constrained
from runtime.scheduler.batch import Batch, Int64Array, Masks, NewRow

NO_ROWS: Int64Array = np.zeros(0, dtype=np.int64)


class KernelSampler:
    def __init__(self, vocab_size: int, last_token: Tensor) -> None:
        """last_token [slots] int64: each slot's newest token, which the kernels write."""
        num_slots = len(last_token)
        self.state = SamplerState(num_slots, vocab_size, last_token.device)
        self._last_token = last_token
        self._constrained_rows = ConstrainedRows(self.state, last_token)
        # By slot: rows that `sample` leaves out, and rows whose log-probabilities it leaves out.
        self._constrained = np.zeros(num_slots, dtype=np.bool_)
        self._scored = np.zeros(num_slots, dtype=np.bool_)

    def reset(self, new_rows: list[NewRow]) -> None:
        """See Sampler."""
        for row in new_rows:
            self.reset_host(row)
        if new_rows:
            self.send(new_rows)

    def reset_host(self, row: NewRow) -> None:
        """Store what a new sequence needs besides its row of `state`."""
        constrained = is_constrained(row.params)
        scored = row.params.logprobs is not None and not constrained
        self._constrained[row.slot], self._scored[row.slot] = constrained, scored
        if constrained or scored:
            self._constrained_rows.reset(row)
        if row.params.has_penalties:
            self.state.count(row.slot, row.history, row.prompt_len)

    def send(self, new_rows: list[NewRow]) -> None:
        """Upload the rows of `state` of new sequences."""
        block = np.empty((len(new_rows), ROW_WORDS), dtype=np.int32)
        self.state.pack(new_rows, block)
        self.state.apply(upload(block, self.state.device))

    def partition(
        self, slots: Int64Array, samples: NDArray[np.bool_]
    ) -> tuple[Int64Array, DeferredRows | None]:
        """Of rows in `slots` [R] that may sample [R]: the slots of those that `sample` samples, -1
        in others; and the deferred rows, if there are any."""
        constrained, scored = self._constrained[slots] & samples, self._scored[slots] & samples
        deferred: DeferredRows | None = None
        if np.count_nonzero(constrained | scored):
            deferred = DeferredRows(constrained.nonzero()[0], scored.nonzero()[0])
        return np.where(samples & ~constrained, slots, -1), deferred

    def sample_deferred(
        self, logits: Tensor, deferred: DeferredRows, batch: Batch, masks: Masks | None
    ) -> SamplerOutput:
        """The outputs of deferred rows, by the logits [B, vocab] of the batch's rows."""
        allowed = AllowedMasks.of(masks, deferred.constrained)
        ends = batch.starts + batch.q_lens
        return self._constrained_rows.sample(logits, batch.slots, ends, deferred, allowed)

    def sample(
        self, logits: Tensor, batch: Batch, rows: Int64Array, masks: Masks | None
    ) -> list[SamplerOutput]:
        """See Sampler: all of it, without a captured step."""
        slots, ends = batch.slots[rows], (batch.starts + batch.q_lens)[rows]
        sampled, deferred = self.partition(slots, np.ones(len(rows), dtype=np.bool_))
        columns = upload(np.stack([sampled, ends]).astype(np.int32), logits.device)
        tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        usable = torch.empty(len(rows), dtype=torch.int8, device=logits.device)
        sample(logits, columns[0], columns[1], self.state, self._last_token, tokens, usable)
        outputs = [SamplerOutput(rows.tolist(), tokens, usable, [], [], None)]
        if deferred is not None:
            allowed = AllowedMasks.of(masks, rows[deferred.constrained])
            found = self._constrained_rows.sample(logits, slots, ends, deferred, allowed)
            own, scored = rows[found.rows].tolist(), rows[found.scored].tolist()
            outputs.append(replace(found, rows=own, scored=scored))
        return outputs
