"""Steps: batches run on the device as whole steps; what the host does for one is here."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.batch import Batch, NewRow
from runtime.buckets import Bucket, Buckets
from runtime.device import upload
from runtime.graphs import Graphs
from runtime.inputs import Model
from runtime.results import Arrival
from runtime.sampler_state import ROW_WORDS, SamplerState, is_special
from runtime.slots import Slots
from runtime.step_buffers import Layout, StepBuffers
from runtime.whole_step import Outcome, WholeStep

NOTHING = Batch([], [], [], [], [], [], [], 0, [])
NO_ROWS = np.zeros(0, dtype=np.int32)
NO_SPECIAL = np.zeros(0, dtype=np.int64)


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
            pages_before = pages_before + np.asarray(batch.num_new_pages, dtype=np.int32)
            batch = replace(batch, num_new_pages=[0] * len(batch.slots), new_pages=[])
        sample_slots, special = self._who_samples(batch)
        self._buffers.send(bucket, batch, pages_before, sample_slots, plain, self._sampler)
        every_state = self._slots.wants_every_state(batch)
        outcome = self.graphs.run(bucket, every_state=every_state)
        chosen = self._step.results.fetch(bucket.rows)
        return Launched(outcome, every_state, special, chosen)

    def _who_samples(self, batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The slots whose tokens the step chooses, -1 in other rows; and special rows."""
        slots = np.frombuffer(array("i", batch.slots), dtype=np.int32)
        special = self._slots.special[slots]
        if batch.decode_rows == len(slots) and not special.any():
            return slots, NO_SPECIAL
        samples = np.asarray(batch.sample, dtype=np.bool_)
        special &= samples
        return np.where(samples & ~special, slots, -1), np.flatnonzero(special)

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
