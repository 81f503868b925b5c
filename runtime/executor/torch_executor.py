"""ModelRunner: runs batches through the model and samples their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.config import ResolvedConfig
from runtime.executor.inputs import ModelProtocol, build_input
from runtime.executor.pending import DevicePendingOutput, RowOutputs
from runtime.executor.pooling import PooledRows
from runtime.executor.prompt_logprobs import PromptLogprobsTensors, score_prompts
from runtime.executor.slots import SequenceSlots
from runtime.executor.transfers import upload
from runtime.sampling.eager import AllowedMasks, sample_tokens
from runtime.sampling.sampler_output import SamplerOutput
from runtime.scheduler.batch import Batch, Int64Array, Masks

if TYPE_CHECKING:
    from runtime.cuda_graph.executor import GraphStepRunner
    from runtime.sampling.constrained_rows import DeferredRows
from numpy.typing import NDArray

from runtime.executor.transfers import Download
from runtime.scheduler.batch import LAST


class PrefillCheck:
    """RowOutputs of eager steps with rows that only prefill: whether these are free of NaN.

    The last token of a chunk attends to all others in every layer: a NaN among the keys or values
    that the chunk stored is in that token's hidden state, too.

    tokens [B] int32, all LAST; usable [B] int8, 1 in rows that sample.  Valid after wait().
    """

    def __init__(self, batch: Batch, hidden: Tensor, device: torch.device) -> None:
        """hidden [B, hidden]: of each row's last token."""
        self.tokens: NDArray[np.int32] = np.full(len(batch.slots), LAST, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.ones(len(batch.slots), dtype=np.int8)
        self._rows = (~batch.sample).nonzero()[0]
        states = hidden.index_select(0, upload(self._rows, device))
        self._download = Download([states.isfinite().all(-1)], device)

    def wait(self) -> None:
        """Block until the device has finished the step."""
        [finite] = self._download.wait()
        self.usable[self._rows] = finite.numpy()


class ModelRunner:
    """`forward`, then `sample` with the same batch; on a GPU, both return before it is done."""

    def __init__(
        self,
        model: ModelProtocol,
        *,
        resolved: ResolvedConfig,
        vocab_size: int,
        kv: KVPool,
        backend: Backend,
        device: torch.device,
        graph_steps: bool | None = None,
    ) -> None:
        """graph_steps: run by GraphStepRunner; None: on a GPU, if the back end supports it."""
        self.device = device
        # A CPU has finished a step when the call returns, so nothing could overlap with it.
        self.overlap = device.type == "cuda"
        self._model = model
        self._backend = backend
        self._kv = kv
        self._slots = SequenceSlots(
            resolved.max_num_seqs, resolved.max_pages_per_seq, vocab_size, device
        )
        self.steps: GraphStepRunner | None = None
        if graph_steps is None:
            graph_steps = device.type == "cuda" and backend.reads_lengths_on_device
        if graph_steps:
            from runtime.cuda_graph.executor import (
                GraphStepRunner,  # needs Triton, which is not everywhere
            )

            self.steps = GraphStepRunner(
                model,
                kv=kv,
                backend=backend,
                slots=self._slots,
                max_tokens=resolved.max_batched_tokens,
                device=device,
            )
        self._row_outputs: RowOutputs | None = None
        self._deferred: DeferredRows | None = None
        self._sampled_rows: Int64Array = np.zeros(0, dtype=np.int64)
        self._logits: Tensor | None = None
        self._prompt_scores: list[PromptLogprobsTensors] = []
        self._pooled: PooledRows | None = None

    def use(self, kv: KVPool) -> None:
        """Switch to another KV pool, after memory profiling on a small one."""
        self._kv = kv
        if self.steps is not None:
            self.steps.use(kv)

    def prepare(self) -> bool:
        """Capture one more CUDA graph, in a tenth of a second.  True if others are left."""
        return self.steps is not None and self.steps.graphs.capture_next()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Store the batch's keys and values; compute the logits of rows that sample."""
        run = self._forward(batch) if self.steps is None else self._enqueue(self.steps, batch)
        hidden, all_hidden_states = run
        self._prompt_scores = []
        if all_hidden_states:
            self._prompt_scores = score_prompts(batch, hidden, self._slots, self._model.logits)
        self._pooled = self._slots.pooling_states.take(
            batch, hidden, all_hidden_states=all_hidden_states
        )

    def _forward(self, batch: Batch) -> tuple[Tensor, bool]:
        """Hidden states, and whether they are those of all tokens or of each row's last one."""
        self._slots.begin(batch)
        all_hidden_states = self._slots.needs_all_hidden_states(batch)
        inp = build_input(
            batch, self._slots, self._kv, self._backend, all_hidden_states=all_hidden_states
        )
        hidden = self._model(inp)
        of_rows = hidden
        if all_hidden_states:
            of_rows = hidden.index_select(0, upload(np.cumsum(batch.q_lens) - 1, self.device))
        self._sampled_rows = batch.sample.nonzero()[0]
        self._logits = None
        if len(self._sampled_rows):
            rows = upload(self._sampled_rows, self.device)
            self._logits = self._model.logits(of_rows.index_select(0, rows))
        some_prefill_only = len(self._sampled_rows) < len(batch.slots)
        self._row_outputs = PrefillCheck(batch, of_rows, self.device) if some_prefill_only else None
        return hidden, all_hidden_states

    def _enqueue(self, steps: GraphStepRunner, batch: Batch) -> tuple[Tensor, bool]:
        launched = steps.launch(batch)
        self._row_outputs, self._deferred = launched.row_outputs, launched.deferred
        self._sampled_rows = launched.deferred.rows
        self._logits = launched.outputs.logits if launched.deferred else None
        return launched.outputs.hidden, launched.all_hidden_states

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: Masks | None = None) -> DevicePendingOutput:
        """Sample the batch's rows, some of them restricted by `masks`."""
        sampler_output: SamplerOutput | None = None
        rows = self._sampled_rows
        if self._logits is not None:
            sampler_output = self._sample_tokens(self._logits, batch, masks)
            self._logits = None
        scores, self._prompt_scores = self._prompt_scores, []
        pooled, self._pooled = self._pooled, None
        return DevicePendingOutput(
            len(batch.slots),
            self._row_outputs,
            rows.tolist(),
            sampler_output,
            scores,
            pooled,
            self.device,
        )

    def _sample_tokens(self, logits: Tensor, batch: Batch, masks: Masks | None) -> SamplerOutput:
        if self.steps is not None and self._deferred is not None:
            allowed = None if masks is None else _allowed(masks, self._deferred.constrained)
            return self.steps.constrained_rows.sample_tokens(logits, self._deferred, batch, allowed)
        rows, ends = self._sampled_rows, batch.starts + batch.q_lens
        allowed = None if masks is None else _allowed(masks, rows)
        return sample_tokens(logits, self._slots, batch.slots[rows], ends[rows], allowed)


def _allowed(masks: Masks, sampled: Int64Array) -> AllowedMasks:
    """`masks` renumbered by rows of the logits, which hold only the rows `sampled` of the batch."""
    rows = np.searchsorted(sampled, np.asarray(masks.rows, dtype=np.int64))
    bits = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(rows), -1)
    return AllowedMasks(rows, bits)
