"""Steps: batches run on the device as whole steps; what the host does for one is here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.graphs import Graphs
from runtime.cuda_graph.input_block import Layout, StepBuffers
from runtime.cuda_graph.output_ring import Arrival
from runtime.cuda_graph.step import Outcome, WholeStep
from runtime.executor.inputs import Model
from runtime.executor.slots import Slots
from runtime.executor.transfers import upload
from runtime.sampling.constrained_rows import Left, SpecialRows
from runtime.sampling.state import ROW_WORDS, SamplerState, is_special
from runtime.scheduler.batch import Batch, Ints, NewRow, make_batch

NOTHING = make_batch()
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NOTHING_LEFT = Left(NO_ROWS, NO_ROWS)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is queued, and what is left to do behind it."""

    outcome: Outcome
    every_state: bool  # its hidden states are those of all tokens
    left: Left
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
        self.special_rows = SpecialRows(slots, self._sampler)
        slots.eager = False
        # Of slots: whose tokens a step does not choose, and whose it does, but does not score.
        self._special = np.zeros(most_rows, dtype=np.bool_)
        self._scored = np.zeros(most_rows, dtype=np.bool_)
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
        new_rows = self._begin(batch, layout)
        pages_before = self._slots.begin_on_host(batch)
        if len(batch.new_pages) > layout.page_room:
            self._slots.append_pages(batch, pages_before)
            pages_before = pages_before + batch.num_new_pages
            none = np.zeros(len(batch.slots), dtype=np.int64)
            batch = replace(batch, num_new_pages=none, new_pages=NO_ROWS)
        sample_slots, left = self._who_samples(batch)
        self._buffers.send(bucket, batch, pages_before, sample_slots, new_rows, self._sampler)
        every_state = self._slots.wants_every_state(batch)
        outcome = self.graphs.run(bucket, every_state=every_state)
        chosen = self._step.results.fetch(bucket.rows)
        return Launched(outcome, every_state, left, chosen)

    def _who_samples(self, batch: Batch) -> tuple[Ints, Left]:
        """The slots whose tokens the step chooses, -1 in other rows; and what it leaves to do."""
        slots, samples = batch.slots, batch.sample
        special, scored = self._special[slots] & samples, self._scored[slots] & samples
        left = NOTHING_LEFT
        if np.count_nonzero(special | scored):
            left = Left(special.nonzero()[0], scored.nonzero()[0])
        if batch.decode_rows == len(slots) and not len(left.special):
            return slots, left
        return np.where(samples & ~special, slots, -1), left

    def _begin(self, batch: Batch, layout: Layout) -> list[NewRow]:
        """The new rows, as many as the step's block can take.

        The slots of the others learn at once what is asked of them.
        """
        new_rows = batch.new_rows
        for row in new_rows:
            special = is_special(row.params)
            scored = row.params.logprobs is not None
            self._special[row.slot], self._scored[row.slot] = special, scored and not special
            if special or scored:
                self.special_rows.start_over(row)
            if row.params.has_penalties:
                self._sampler.count(row.slot, row.history, row.prompt_len)
        rest = new_rows[layout.num_new_rows :]
        if rest:
            block = np.empty((len(rest), ROW_WORDS), dtype=np.int32)
            self._sampler.pack(rest, block)
            self._sampler.apply(upload(block, self._slots.device))
        return new_rows[: layout.num_new_rows]

    def _rehearse(self, bucket: Bucket) -> None:
        """Run a step without rows, which changes nothing, through as few layers as tell all."""
        self._buffers.send(bucket, NOTHING, NO_ROWS, NO_ROWS, [], self._sampler)
        with self._model.shortened():
            self._step.run(bucket)
