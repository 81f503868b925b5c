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
from runtime.cuda_graph.output_ring import OutputCopy
from runtime.cuda_graph.step import GraphStep, StepTensors
from runtime.executor.inputs import ModelProtocol
from runtime.executor.slots import SequenceSlots
from runtime.executor.transfers import upload
from runtime.sampling.constrained_rows import ConstrainedRows, UnfinishedRows
from runtime.sampling.state import ROW_WORDS, SamplerState, is_constrained
from runtime.scheduler.batch import Batch, Int64Array, NewRow, make_batch

NOTHING = make_batch()
NO_ROWS: Int64Array = np.zeros(0, dtype=np.int64)
ALL_FINISHED = UnfinishedRows(NO_ROWS, NO_ROWS)


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step that is queued, and what is left to do behind it."""

    outcome: StepTensors
    all_hidden_states: bool  # its hidden states are those of all tokens
    unfinished: UnfinishedRows
    row_tokens: OutputCopy


class GraphStepRunner:
    def __init__(
        self,
        model: ModelProtocol,
        *,
        kv: KVPool,
        backend: Backend,
        slots: SequenceSlots,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        max_rows = len(slots.params)
        buckets = Buckets(max_rows, max_tokens)
        self._model, self._slots = model, slots
        self._sampler = SamplerState(max_rows, slots.vocab_size, device)
        self.constrained_rows = ConstrainedRows(slots, self._sampler)
        slots.eager = False
        # Of slots: whose tokens a step does not choose, and whose it does, but does not score.
        self._constrained = np.zeros(max_rows, dtype=np.bool_)
        self._scored = np.zeros(max_rows, dtype=np.bool_)
        self._buffers = StepBuffers(buckets.largest, device)
        self._step = GraphStep(
            model,
            kv=kv,
            backend=backend,
            slots=slots,
            sampler=self._sampler,
            block=self._buffers.block,
            buckets=buckets,
        )
        self.graphs = Graphs(self._step.run, self._dry_run, buckets, device)

    def use(self, kv: KVPool) -> None:
        """Keys and values are kept there from now on.  Graphs know the pool they began with."""
        assert not self.graphs.captured
        self._step.kv = kv

    def launch(self, batch: Batch) -> QueuedStep:
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
        sample_slots, unfinished = self._who_samples(batch)
        self._buffers.send(bucket, batch, pages_before, sample_slots, new_rows, self._sampler)
        all_hidden_states = self._slots.needs_all_hidden_states(batch)
        outcome = self.graphs.run(bucket, all_hidden_states=all_hidden_states)
        row_tokens = self._step.results.fetch(bucket.rows)
        return QueuedStep(outcome, all_hidden_states, unfinished, row_tokens)

    def _who_samples(self, batch: Batch) -> tuple[Int64Array, UnfinishedRows]:
        """The slots whose tokens the step chooses, -1 in other rows; and what it leaves to do."""
        slots, samples = batch.slots, batch.sample
        constrained, scored = self._constrained[slots] & samples, self._scored[slots] & samples
        unfinished = ALL_FINISHED
        if np.count_nonzero(constrained | scored):
            unfinished = UnfinishedRows(constrained.nonzero()[0], scored.nonzero()[0])
        if batch.decode_rows == len(slots) and not len(unfinished.constrained):
            return slots, unfinished
        return np.where(samples & ~constrained, slots, -1), unfinished

    def _begin(self, batch: Batch, layout: Layout) -> list[NewRow]:
        """The new rows, as many as the step's block can take.

        The slots of the others learn at once what is asked of them.
        """
        new_rows = batch.new_rows
        for row in new_rows:
            constrained = is_constrained(row.params)
            scored = row.params.logprobs is not None
            self._constrained[row.slot], self._scored[row.slot] = (
                constrained,
                scored and not constrained,
            )
            if constrained or scored:
                self.constrained_rows.reset(row)
            if row.params.has_penalties:
                self._sampler.count(row.slot, row.history, row.prompt_len)
        rest = new_rows[layout.num_new_rows :]
        if rest:
            block = np.empty((len(rest), ROW_WORDS), dtype=np.int32)
            self._sampler.pack(rest, block)
            self._sampler.apply(upload(block, self._slots.device))
        return new_rows[: layout.num_new_rows]

    def _dry_run(self, bucket: Bucket) -> None:
        """Run a step without rows, which changes nothing, through as few layers as tell all."""
        self._buffers.send(bucket, NOTHING, NO_ROWS, NO_ROWS, [], self._sampler)
        with self._model.shortened():
            self._step.run(bucket)
