"""Steps: batches run on the device as whole steps; what the host does for one is here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.batch import Batch, Ints, NewRow, make_batch
from runtime.buckets import Bucket, Buckets
from runtime.device import upload
from runtime.graphs import Graphs
from runtime.inputs import Model
from runtime.results import Arrival
from runtime.sampler_state import ROW_WORDS, SamplerState, is_special
from runtime.slots import Slots
from runtime.step_buffers import Layout, StepBuffers
from runtime.whole_step import Outcome, WholeStep

NOTHING = make_batch()
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is queued.  `special`: rows that sample, but not within the step."""

    outcome: Outcome
    every_state: bool  # its hidden states are those of all tokens
    special: NDArray[np.int64]
    chosen: Arrival


class Steps:
    def __init__(
        self,
        model: Model,
        *,
        kv: KVPool,
        backend: Backend,
        slots: Slots,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        most_rows = len(slots.params)
        buckets = Buckets(most_rows, most_tokens)
        self._model, self._slots = model, slots
        self._sampler = SamplerState(most_rows, slots.vocab_size, device)
        self._buffers = StepBuffers(buckets.largest, device)
        self._step = WholeStep(
            model,
            kv=kv,
            backend=backend,
            slots=slots,
            sampler=self._sampler,
            block=self._buffers.block,
            buckets=buckets,
        )
        self.graphs = Graphs(self._step.run, self._rehearse, buckets, device)

    def use(self, kv: KVPool) -> None:
        """Keys and values are kept there from now on.  Graphs know the pool they began with."""
        assert not self.graphs.captured
        self._step.kv = kv

    def launch(self, batch: Batch) -> Launched:
        """Queue the step of a batch, and the copy of its results."""
        self.graphs.capture_missed()
        bucket = self.graphs.fit(len(batch.tokens), len(batch.slots))
        layout = Layout.of(bucket)
        plain = self._begin(batch, layout)
        pages_before = self._slots.begin_on_host(batch)
        if len(batch.new_pages) > layout.page_room:
            self._slots.append_pages(batch, pages_before)
            pages_before = pages_before + batch.num_new_pages
            none = np.zeros(len(batch.slots), dtype=np.int64)
            batch = replace(batch, num_new_pages=none, new_pages=NO_ROWS)
        sample_slots, special = self._who_samples(batch)
        self._buffers.send(bucket, batch, pages_before, sample_slots, plain, self._sampler)
        every_state = self._slots.wants_every_state(batch)
        outcome = self.graphs.run(bucket, every_state=every_state)
        chosen = self._step.results.fetch(bucket.rows)
        return Launched(outcome, every_state, special, chosen)

    def _who_samples(self, batch: Batch) -> tuple[Ints, Ints]:
        """The slots whose tokens the step chooses, -1 in other rows; and special rows."""
        slots, samples = batch.slots, batch.sample
        special = self._slots.special[slots] & samples
        if batch.decode_rows == len(slots) and not np.count_nonzero(special):
            return slots, NO_ROWS
        return np.where(samples & ~special, slots, -1), special.nonzero()[0]

    def _begin(self, batch: Batch, layout: Layout) -> list[NewRow]:
        """Those of the new rows whose tokens the step will choose, as many as its block can take.

        The slots of the others learn at once what is asked of them.
        """
        plain: list[NewRow] = []
        for row in batch.new_rows:
            special = is_special(row.params) or bool(row.params.grammar)
            self._slots.special[row.slot] = special
            if not special:
                plain.append(row)
                if row.params.has_penalties:
                    self._sampler.count(row.slot, row.history, row.prompt_len)
        rest = plain[layout.num_new_rows :]
        if rest:
            block = np.empty((len(rest), ROW_WORDS), dtype=np.int32)
            self._sampler.pack(rest, block)
            self._sampler.apply(upload(block, self._slots.device))
        return plain[: layout.num_new_rows]

    def _rehearse(self, bucket: Bucket) -> None:
        """Run a step without rows, which changes nothing, through as few layers as tell all."""
        self._buffers.send(bucket, NOTHING, NO_ROWS, NO_ROWS, [], self._sampler)
        with self._model.shortened():
            self._step.run(bucket)
