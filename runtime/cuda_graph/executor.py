"""GraphStepRunner: the host's part of steps that run from CUDA graphs."""

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
from runtime.sampling.constrained_rows import ConstrainedRows, DeferredRows
from runtime.sampling.state import ROW_WORDS, SamplerState, is_constrained
from runtime.scheduler.batch import Batch, Int64Array, NewRow, make_batch

EMPTY_BATCH = make_batch()
NO_ROWS: Int64Array = np.zeros(0, dtype=np.int64)
NONE_DEFERRED = DeferredRows(NO_ROWS, NO_ROWS)


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A queued step, and the rows that it leaves to ConstrainedRows."""

    outputs: StepTensors
    all_hidden_states: bool  # outputs.hidden is of all tokens
    deferred: DeferredRows
    row_outputs: OutputCopy


class GraphStepRunner:
    """Runs batches padded to buckets, from a CUDA graph where one is captured."""

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
        # By slot: rows that a step does not sample, and rows that it samples but does not score.
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
        """Switch to another KV pool.  No graph may be captured yet: it keeps the addresses."""
        assert not self.graphs.captured
        self._step.kv = kv

    def launch(self, batch: Batch) -> QueuedStep:
        """Queue the step of a batch, and the copy of its outputs to the host."""
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
        sample_slots, deferred = self._who_samples(batch)
        self._buffers.send(bucket, batch, pages_before, sample_slots, new_rows, self._sampler)
        all_hidden_states = self._slots.needs_all_hidden_states(batch)
        outputs = self.graphs.run(bucket, all_hidden_states=all_hidden_states)
        row_outputs = self._step.output_ring.fetch(bucket.rows)
        return QueuedStep(outputs, all_hidden_states, deferred, row_outputs)

    def _who_samples(self, batch: Batch) -> tuple[Int64Array, DeferredRows]:
        """The slots [B] of the rows that the step samples, -1 in others; and the deferred rows."""
        slots, samples = batch.slots, batch.sample
        constrained, scored = self._constrained[slots] & samples, self._scored[slots] & samples
        deferred = NONE_DEFERRED
        if np.count_nonzero(constrained | scored):
            deferred = DeferredRows(constrained.nonzero()[0], scored.nonzero()[0])
        if batch.decode_rows == len(slots) and not len(deferred.constrained):
            return slots, deferred
        return np.where(samples & ~constrained, slots, -1), deferred

    def _begin(self, batch: Batch, layout: Layout) -> list[NewRow]:
        """The new rows that fit into the step's block.

        The sampling parameters of the others are uploaded here.
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
        """Run a step of padding alone, which changes no state, through the first layers."""
        self._buffers.send(bucket, EMPTY_BATCH, NO_ROWS, NO_ROWS, [], self._sampler)
        with self._model.shortened():
            self._step.run(bucket)
