"""GraphExecutor: the host's part of steps that are padded to buckets and run from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.config import ResolvedConfig
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.buffers import StepBuffers, StepOutputs
from runtime.cuda_graph.encoder_graphs import EncoderGraphs
from runtime.cuda_graph.graphs import Graphs
from runtime.cuda_graph.launch import (
    CaptureLaunch,
    Launch,
    LaunchPlanner,
    StepLaunch,
)
from runtime.cuda_graph.step import GraphStep, StepTensors
from runtime.executor.announced import Announce, Sampling
from runtime.executor.images import RowImages
from runtime.executor.pending import DevicePendingOutput, StepClock, StepSpan
from runtime.executor.prompt_outputs import PromptOutputs, StepPromptOutputs
from runtime.executor.protocols import ModelProtocol
from runtime.executor.slots import SlotTables
from runtime.executor.state_store import StateStore
from runtime.sampling.constrained_rows import DeferredRows
from runtime.sampling.kernel_sampler import NO_ROWS, KernelSampler
from runtime.scheduler.batch import Batch, Masks, make_batch
from runtime.startup.device import free_bytes, is_out_of_memory
from runtime.stats import ImageCounts

EMPTY_BATCH = make_batch()


class GraphExecutor:
    """An Executor (runtime/engine/loop.py) whose calls return before the device is done."""

    def __init__(
        self,
        model: ModelProtocol,
        *,
        resolved: ResolvedConfig,
        vocab_size: int,
        kv: KVPool,
        backend: Backend,
        device: torch.device,
        images: RowImages | None = None,
    ) -> None:
        """images: of a model that reads them"""
        assert resolved.max_tokens_per_row == 1, "a step samples one token a row"
        self.overlap = True
        max_rows = resolved.max_num_seqs
        self._model, self._images = model, images
        groups = resolved.num_groups
        self._slots = SlotTables(max_rows, resolved.max_pages_per_seq, device, groups)
        self._sampler = KernelSampler(vocab_size, self._slots.last_token)
        self._prompts = PromptOutputs()
        self._states: StateStore | None = None
        if kv.states is not None:
            self._states = StateStore(resolved.num_snapshots, kv.states)
        self._buckets = Buckets(max_rows, resolved.max_batched_tokens, images=images is not None)
        self._buffers = StepBuffers(self._buckets.largest, device, groups)
        self._step = GraphStep(
            model,
            kv=kv,
            backend=backend,
            slots=self._slots,
            sampler=self._sampler.state,
            buffers=self._buffers,
            buckets=self._buckets,
            position_deltas=None if images is None else images.position_deltas,
            images=None if images is None else images.buffers,
        )
        self.graphs = Graphs(self._step.run, self._dry_run, device)
        self._encoder_graphs: EncoderGraphs | None = None
        if images is not None and isinstance(images.encoder, EncoderGraphs):
            self._encoder_graphs = images.encoder
        self.planner = LaunchPlanner(
            self._buckets,
            self.graphs.captured,
            free_bytes=lambda: free_bytes(device),
            uncaptured=self._buckets.graphs() if device.type == "cuda" else [],
        )
        self.graph_counts = self.planner.counts
        self.image_counts = ImageCounts() if images is None else images.counts
        self.announce: Announce | None = None
        self._clock = StepClock(self._buffers.new_event)
        self._span: StepSpan | None = None  # of the last step
        self._batch: Batch | None = None  # of the last step
        # Of a model that is divided: a rank whose capture failed would not take part in the sums of
        # the others' replays, and all its later sums would be theirs of a step before.
        self.must_capture = False
        self._outputs: StepTensors | None = None
        self._row_outputs: StepOutputs | None = None
        self._deferred: DeferredRows | None = None
        self._prompt_outputs: StepPromptOutputs | None = None

    # Startup.

    def use(self, kv: KVPool) -> None:
        """Switch to another KV pool.  No graph may be captured yet: it keeps the addresses."""
        assert not self.graphs.captured
        self._step.kv = kv

    def step_times(self, batch: Batch, choices: Sequence[Callable[[], None]]) -> list[float]:
        """As DeviceExecutor.step_times."""
        bucket = self._buckets.fit(len(batch.tokens), len(batch.slots))

        def queue() -> None:
            self.forward(batch)
            self.sample(batch)

        return self.graphs.step_times(bucket, choices, queue)

    def measure_graphs(self) -> int:
        """The bytes of all graphs; 0 if none can be captured: steps run without.

        Raises only out-of-memory errors, unless must_capture.
        """
        try:
            total, self.planner.bytes_per_graph = self.graphs.measure(self._buckets.graphs())
        except RuntimeError as error:
            if is_out_of_memory(error) or self.must_capture:
                raise
            self.graphs.launch_bound_tokens = 0
            self.planner.give_up("steps", error)
            self._encoder_graphs = None  # which then runs as it does before they are captured
            return 0
        if self._encoder_graphs is not None:
            total += self._encoder_graphs.measure(self.graphs.pool)
        return total

    @property
    def launch_bound_tokens(self) -> int:
        return self.graphs.launch_bound_tokens

    def extend_graphs(self, tokens: int) -> bool:
        return self.planner.extend(tokens)

    def capture_startup_set(self) -> None:
        """Capture the graphs that a server has before its first request."""
        startup_set = set(self._buckets.startup_set())
        for bucket in self._buckets.graphs():
            launch = self.planner.take(bucket, needs_room=False) if bucket in startup_set else None
            if launch is not None:
                self.run(launch)
        if self._encoder_graphs is not None:
            self._encoder_graphs.capture(self.graphs.pool)

    # The Executor protocol.

    def prepare(self) -> bool:
        """Capture one more CUDA graph, in a tenth of a second.  True if others are left."""
        launch = self.planner.next_capture()
        if launch is not None:
            self.run(launch)
        return not self.planner.is_complete

    def forward(self, batch: Batch) -> None:
        """Queue the step of a batch, which writes its tokens into the host's memory."""
        all_hidden_states = False
        if batch.new_rows or self._prompts.prompts:
            all_hidden_states = self._prompts.needs_all_hidden_states(batch)
        has_images = self._images is not None and self._images.in_step(batch)
        self.run(
            self.planner.plan(batch, all_hidden_states=all_hidden_states, has_images=has_images)
        )

    def follow(self, announced: object) -> None:
        """Do what the executor of rank 0 has announced."""
        if isinstance(announced, Sampling):
            assert self._batch is not None
            self.sample(replace(self._batch, sample=announced.sample), announced.masks)
        else:
            assert isinstance(announced, StepLaunch | CaptureLaunch)
            self.run(announced)

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: Masks | None = None) -> DevicePendingOutput:
        """Sample the rows that the step of forward() has deferred, some restricted by `masks`."""
        assert self._outputs is not None and self._row_outputs is not None
        if self.announce is not None:
            self.announce(Sampling(batch.sample, masks))
        outputs = []
        if self._deferred is not None:
            logits = self._outputs.logits
            outputs = [self._sampler.sample_deferred(logits, self._deferred, batch, masks)]
            self._span = self._clock.end()  # later than run() has marked it
        return DevicePendingOutput(
            len(batch.slots),
            self._row_outputs,
            outputs,
            self._prompt_outputs,
            self._slots.device,
            self._span,
        )

    @torch.inference_mode()
    def run(self, launch: Launch) -> None:
        """Queue a launch, which nothing but earlier launches influences."""
        if self.announce is not None:
            self.announce(launch)
        if isinstance(launch, CaptureLaunch):
            self._capture(launch.bucket)
            return
        self._clock.begin()
        batch, layout = launch.batch, self._buffers.layout(launch.bucket)
        self._batch = batch
        for row in batch.new_rows:
            self._prompts.reset(row)
            self._sampler.reset_host(row)
        new_rows, others = (
            batch.new_rows[: layout.num_new_rows],
            batch.new_rows[layout.num_new_rows :],
        )
        if others:
            self._sampler.send(others)
        pages_before = self._slots.count_pages(batch)
        if len(batch.new_pages) > layout.page_room:
            self._slots.append_pages(batch, pages_before)
            pages_before = pages_before + batch.num_new_pages
            none = np.zeros(len(batch.slots), dtype=np.int64)
            batch = replace(batch, num_new_pages=none, new_pages=NO_ROWS)
        if self._states is not None:
            self._states.copy(batch, self._step.kv)
        sample_slots, self._deferred = self._sampler.partition(batch.slots, batch.sample)
        self._buffers.send(
            launch.bucket, batch, pages_before, sample_slots, new_rows, self._sampler.state
        )
        if self._images is not None:
            found = self._images.prepare(batch, launch.bucket.tokens)
            assert launch.bucket.images == (found is not None), "ranks have the same images"
        self._outputs = self._run_step(launch)
        self._prompt_outputs = None
        if self._prompts.prompts:
            self._prompt_outputs = self._prompts.compute(
                batch,
                self._outputs.hidden,
                self._model.logits,
                all_hidden_states=launch.all_hidden_states,
            )
        self._row_outputs = self._buffers.end(launch.bucket.rows)
        self._span = self._clock.end(self._row_outputs.ended)

    def _run_step(self, launch: StepLaunch) -> StepTensors:
        """From the bucket's graph; without, if it could be captured elsewhere and not here."""
        captured = self.graphs.captured.get(launch.bucket) if launch.graph else None
        if captured is None:
            return self._step.run(launch.bucket, all_hidden_states=launch.all_hidden_states)
        captured.graph.replay()
        return captured.outputs

    def _capture(self, bucket: Bucket) -> None:
        """Capture a graph; if that fails, steps of the remaining buckets run without."""
        self.graph_counts.captures += 1
        try:
            self.graphs.capture(bucket)
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            if self.must_capture:
                raise
            self.planner.give_up(f"a step of {bucket.tokens} tokens", error)

    def _dry_run(self, bucket: Bucket) -> None:
        """Run a step of padding alone, which changes no state, through the first layers."""
        self._buffers.send(bucket, EMPTY_BATCH, NO_ROWS, NO_ROWS, [], self._sampler.state)
        if self._images is not None and bucket.images:
            self._images.buffers.clear(bucket.tokens)
        try:
            with self._model.shortened():
                self._step.run(bucket)
        finally:  # without memory, too, the copy of the block is under way
            self._buffers.end(bucket.rows)
