"""Runner: runs batches through the model and keeps what the device must remember."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from runtime.config import Resolved
from runtime.executor.inputs import Model, build_input
from runtime.executor.pending import Chosen, Pending
from runtime.executor.pooling import Pooled
from runtime.executor.prompt_logprobs import PromptScores, score_prompts
from runtime.executor.slots import Slots
from runtime.executor.transfers import upload
from runtime.sampling.eager import Allowed, draw
from runtime.sampling.sampler_output import Drawn
from runtime.scheduler.batch import Batch, Ints, Masks

if TYPE_CHECKING:
    from runtime.cuda_graph.executor import Steps
    from runtime.sampling.constrained_rows import Left
from numpy.typing import NDArray

from runtime.executor.transfers import Download
from runtime.scheduler.batch import LAST


class Fed:
    """Whether rows that sample nothing can be trusted, in steps that do not say so themselves.

    A part of a prompt is read by its last token in every layer: a NaN among the keys or values
    that it stored is in that token's hidden state, too.

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


class Runner:
    """`forward` then `sample` with the same batch; with a GPU, both return before it is done."""

    def __init__(
        self,
        model: Model,
        *,
        resolved: Resolved,
        vocab_size: int,
        kv: KVPool,
        backend: Backend,
        device: torch.device,
        whole_steps: bool | None = None,
    ) -> None:
        """whole_steps: run them as `Steps` do; None: on a GPU, if the back end can."""
        self.device = device
        # A CPU has finished a step when the call returns, so nothing could overlap with it.
        self.overlap = device.type == "cuda"
        self._model = model
        self._backend = backend
        self._kv = kv
        self._slots = Slots(resolved.max_num_seqs, resolved.max_pages_per_seq, vocab_size, device)
        self.steps: Steps | None = None
        if whole_steps is None:
            whole_steps = device.type == "cuda" and backend.reads_lengths_on_device
        if whole_steps:
            from runtime.cuda_graph.executor import Steps  # needs Triton, which is not everywhere

            self.steps = Steps(
                model,
                kv=kv,
                backend=backend,
                slots=self._slots,
                most_tokens=resolved.max_batched_tokens,
                device=device,
            )
        self._chosen: Chosen | None = None
        self._left: Left | None = None
        self._drawn_rows: Ints = np.zeros(0, dtype=np.int64)
        self._logits: Tensor | None = None
        self._prompt_scores: list[PromptScores] = []
        self._pooled: Pooled | None = None

    def use(self, kv: KVPool) -> None:
        """Keep keys and values there from now on: another pool, after warming up on a small one."""
        self._kv = kv
        if self.steps is not None:
            self.steps.use(kv)

    def prepare(self) -> bool:
        """Capture one more graph, which takes a tenth of a second.  True if others are left."""
        return self.steps is not None and self.steps.graphs.capture_next()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Store the keys and values of the batch's tokens; make the logits of rows that sample."""
        run = self._forward(batch) if self.steps is None else self._launch(self.steps, batch)
        hidden, every_state = run
        self._prompt_scores = []
        if every_state:
            self._prompt_scores = score_prompts(batch, hidden, self._slots, self._model.logits)
        self._pooled = self._slots.pools.take(batch, hidden, every_state=every_state)

    def _forward(self, batch: Batch) -> tuple[Tensor, bool]:
        """Hidden states, and whether they are those of all tokens or of each row's last one."""
        self._slots.begin(batch)
        every_state = self._slots.wants_every_state(batch)
        inp = build_input(batch, self._slots, self._kv, self._backend, every_state=every_state)
        hidden = self._model(inp)
        of_rows = hidden
        if every_state:
            of_rows = hidden.index_select(0, upload(np.cumsum(batch.q_lens) - 1, self.device))
        self._drawn_rows = batch.sample.nonzero()[0]
        self._logits = None
        if len(self._drawn_rows):
            rows = upload(self._drawn_rows, self.device)
            self._logits = self._model.logits(of_rows.index_select(0, rows))
        some_feed_only = len(self._drawn_rows) < len(batch.slots)
        self._chosen = Fed(batch, of_rows, self.device) if some_feed_only else None
        return hidden, every_state

    def _launch(self, steps: Steps, batch: Batch) -> tuple[Tensor, bool]:
        launched = steps.launch(batch)
        self._chosen, self._left = launched.chosen, launched.left
        self._drawn_rows = launched.left.rows
        self._logits = launched.outcome.logits if launched.left else None
        return launched.outcome.hidden, launched.every_state

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: Masks | None = None) -> Pending:
        """Choose the tokens of the rows that sample; `masks` limit some of them."""
        drawn: Drawn | None = None
        rows = self._drawn_rows
        if self._logits is not None:
            drawn = self._draw(self._logits, batch, masks)
            self._logits = None
        scores, self._prompt_scores = self._prompt_scores, []
        pooled, self._pooled = self._pooled, None
        return Pending(
            len(batch.slots), self._chosen, rows.tolist(), drawn, scores, pooled, self.device
        )

    def _draw(self, logits: Tensor, batch: Batch, masks: Masks | None) -> Drawn:
        if self.steps is not None and self._left is not None:
            allowed = None if masks is None else _allowed(masks, self._left.special)
            return self.steps.special_rows.draw(logits, self._left, batch, allowed)
        rows, ends = self._drawn_rows, batch.starts + batch.q_lens
        allowed = None if masks is None else _allowed(masks, rows)
        return draw(logits, self._slots, batch.slots[rows], ends[rows], allowed)


def _allowed(masks: Masks, drawn: Ints) -> Allowed:
    """`masks` by rows of the logits, which hold only the rows that `draw` is for."""
    rows = np.searchsorted(drawn, np.asarray(masks.rows, dtype=np.int64))
    bits = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(rows), -1)
    return Allowed(rows, bits)
