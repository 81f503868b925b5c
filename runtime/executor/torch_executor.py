"""TorchExecutor: runs each batch as it is, without padding and without a graph.

It serves CPUs, and on a GPU the attention back ends that need lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.config import ResolvedConfig
from runtime.executor.announced import Announce, Forward, Sampling
from runtime.executor.images import RowImages
from runtime.executor.inputs import build_input
from runtime.executor.pending import DevicePendingOutput, PrefillCheck, StepClock
from runtime.executor.prompt_outputs import PromptOutputs, StepPromptOutputs
from runtime.executor.protocols import ModelProtocol
from runtime.executor.slots import SlotTables
from runtime.executor.state_store import StateStore
from runtime.executor.transfers import upload
from runtime.sampling.sampler import Sampler, SamplerOutput
from runtime.scheduler.batch import Batch, Int64Array, Masks
from runtime.stats import GraphCounts, ImageCounts


class TorchExecutor:
    """An Executor (runtime/engine/loop.py); on a GPU its calls return before the device is done."""

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
        # A CPU has finished a step when the call returns, so nothing could overlap with it.
        self.overlap = device.type == "cuda"
        self.graph_counts = GraphCounts()  # it has none
        self.image_counts = ImageCounts() if images is None else images.counts
        self.announce: Announce | None = None
        self._batch: Batch | None = None  # of forward()
        self._clock = StepClock.of(device)
        self._model, self._kv, self._backend, self._images = model, kv, backend, images
        self._slots = SlotTables(
            resolved.max_num_seqs, resolved.max_pages_per_seq, device, resolved.num_groups
        )
        self._sampler = choose_sampler(vocab_size, self._slots)
        self._prompts = PromptOutputs()
        self._states: StateStore | None = None
        if kv.states is not None:
            self._states = StateStore(resolved.num_snapshots, kv.states)
        self._check: PrefillCheck | None = None
        self._logits: Tensor | None = None  # [R, vocab] of the rows that sample
        self._rows: Int64Array = np.zeros(0, dtype=np.int64)  # these rows
        self._prompt_outputs: StepPromptOutputs | None = None

    def use(self, kv: KVPool) -> None:
        """Switch to another KV pool, after memory profiling on a small one."""
        self._kv = kv

    def step_times(self, batch: Batch, choices: Sequence[Callable[[], None]]) -> list[float]:
        """There are no graphs."""
        return []

    def measure_graphs(self) -> int:
        """0: there are none."""
        return 0

    launch_bound_tokens = 0

    def extend_graphs(self, tokens: int) -> bool:
        """There are no graphs."""
        return False

    def capture_startup_set(self) -> None:
        """There are no graphs."""

    def prepare(self) -> bool:
        """Nothing is deferred."""
        return False

    def follow(self, announced: object) -> None:
        """Do what the executor of rank 0 has announced."""
        match announced:
            case Forward():
                self.forward(announced.batch)
            case Sampling() if self._batch is not None:
                self.sample(structs.replace(self._batch, sample=announced.sample), announced.masks)
            case _:
                raise AssertionError(announced)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Store the batch's keys and values; compute the logits of rows that sample."""
        self._batch = batch
        if self.announce is not None:
            self.announce(Forward(batch))
        self._clock.begin()
        self._slots.append_pages(batch, self._slots.count_pages(batch))
        if self._states is not None:
            self._states.copy(batch, self._kv)
        self._sampler.reset(batch.new_rows)
        for row in batch.new_rows:
            self._prompts.reset(row)
        all_states = self._prompts.needs_all_hidden_states(batch)
        inp = build_input(batch, self._slots, self._kv, self._backend, all_hidden_states=all_states)
        if self._images is not None:
            step_images = self._images.prepare(batch, batch.num_tokens)
            deltas = self._images.deltas(batch)
            if deltas is not None:
                inp = replace(inp, positions=inp.positions + deltas)
            inp = replace(inp, images=step_images)
        hidden = self._model(inp)
        last = hidden  # [B, hidden]
        if all_states:
            ends = np.cumsum(batch.q_lens) - 1
            last = hidden.index_select(0, upload(ends, hidden.device))
        self._rows = batch.sample.nonzero()[0]
        self._logits = None
        if len(self._rows):
            rows = upload(self._rows, hidden.device)
            self._logits = self._model.logits(last.index_select(0, rows))
        self._check = PrefillCheck(batch, last)
        self._prompt_outputs = self._prompts.compute(
            batch, hidden, self._model.logits, all_hidden_states=all_states
        )

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: Masks | None = None) -> DevicePendingOutput:
        """Sample the rows of forward(), some of them restricted by `masks`."""
        assert self._check is not None, "sample() follows forward()"
        if self.announce is not None:
            self.announce(Sampling(batch.sample, masks))
        outputs: list[SamplerOutput] = []
        if self._logits is not None:
            outputs = self._sampler.sample(self._logits, batch, self._rows, masks)
        self._logits = None
        span = self._clock.end()
        return DevicePendingOutput(
            len(batch.slots), self._check, outputs, self._prompt_outputs, self._slots.device, span
        )


def choose_sampler(vocab_size: int, slots: SlotTables) -> Sampler:
    """The kernels on a GPU, plain torch on a CPU."""
    if slots.device.type == "cuda":
        from runtime.sampling.kernel_sampler import KernelSampler  # needs Triton

        return KernelSampler(vocab_size, slots.last_token)
    from runtime.sampling.torch_sampler import TorchSampler

    return TorchSampler(vocab_size, slots.last_token)
