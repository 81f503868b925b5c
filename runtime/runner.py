"""Runner: one rank.  Runs batches through the model and keeps what the device must remember."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from model_zoo.inputs import ModelInput
from runtime.batch import LAST, Batch, Sampled
from runtime.config import Resolved
from runtime.device import Download, upload
from runtime.inputs import build_input
from runtime.messages import TokenLogprob
from runtime.sampler import Drawn, draw
from runtime.scores import Scores, score, token_logprobs
from runtime.slots import Slots

PROMPT_PIECE = 128  # prompt tokens scored at a time: logits of a long prompt would be gigabytes


class Model(Protocol):
    def __call__(self, inp: ModelInput) -> Tensor: ...  # [T, hidden]

    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, hidden] -> [R, vocab] float32


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
    ) -> None:
        self.device = device
        self._model = model
        self._backend = backend
        self._kv = kv
        self._slots = Slots(resolved.max_num_seqs, resolved.max_pages_per_seq, vocab_size, device)
        self._logits: Tensor | None = None
        self._prompt_scores: list[tuple[int, int, Scores]] = []  # row, width, scores of a piece

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Store the keys and values of the batch's tokens; make the logits of rows that sample."""
        self._slots.begin(batch)
        inp = build_input(batch, self._slots, self._kv, self._backend)
        hidden = self._model(inp)
        self._prompt_scores = self._score_prompts(batch, hidden)
        self._logits = None
        if len(inp.logit_rows):
            self._logits = self._model.logits(hidden[inp.logit_rows])

    @torch.inference_mode()
    def sample(self, batch: Batch) -> Pending:
        """Choose the tokens of the rows that sample."""
        drawn: Drawn | None = None
        rows = np.flatnonzero(np.asarray(batch.sample, dtype=np.bool_))
        if self._logits is not None:
            slot_ids = np.asarray(batch.slots, dtype=np.int64)[rows]
            ends = np.asarray(batch.starts, dtype=np.int64) + np.asarray(batch.q_lens)
            drawn = draw(self._logits, self._slots, slot_ids, ends[rows])
            self._logits = None
        scores, self._prompt_scores = self._prompt_scores, []
        return Pending(len(batch.slots), rows.tolist(), drawn, scores)

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[tuple[int, int, Scores]]:
        """Scores of the prompt tokens that the batch feeds, for the rows that want them."""
        wanted = self._slots.params["prompt_logprobs"][batch.slots]
        if (wanted < 0).all():
            return []
        scores: list[tuple[int, int, Scores]] = []
        ends = np.cumsum(batch.q_lens)
        for row in np.flatnonzero(wanted >= 0).tolist():
            first, last = int(ends[row]) - batch.q_lens[row], int(ends[row])
            slot, width = batch.slots[row], int(wanted[row])
            fed = batch.tokens[first : min(last, first + self._prompt_left(batch, row))]
            states, before = hidden[first:last], self._slots.before[slot]
            self._slots.before[slot] = states[-1:].clone() if len(fed) == last - first else None
            if before is not None:
                states = torch.cat([before, states])
            else:
                fed = fed[1:]  # nothing comes before a prompt's first token
            scores += [(row, width, piece) for piece in self._score(states, fed, width)]
        return scores

    def _prompt_left(self, batch: Batch, row: int) -> int:
        """Prompt tokens from the row's first on."""
        return max(0, int(self._slots.params["prompt_len"][batch.slots[row]]) - batch.starts[row])

    def _score(self, states: Tensor, tokens: list[int], width: int) -> list[Scores]:
        targets = upload(np.asarray(tokens, dtype=np.int64), self.device)
        return [
            score(self._model.logits(states[i : i + len(piece)]), piece, width)
            for i, piece in zip(
                range(0, len(tokens), PROMPT_PIECE), targets.split(PROMPT_PIECE), strict=False
            )
        ]


class Pending:
    """A step whose results are on their way to the host."""

    def __init__(
        self,
        num_rows: int,
        sampled_rows: list[int],
        drawn: Drawn | None,
        prompt_scores: list[tuple[int, int, Scores]],
    ) -> None:
        self._num_rows = num_rows
        self._rows = sampled_rows
        self._drawn = drawn
        self._prompt_scores = prompt_scores
        tensors: list[Tensor] = []
        if drawn is not None:
            tensors += [drawn.tokens, drawn.usable]
            tensors += drawn.scores.tensors() if drawn.scores is not None else []
        for _, _, scores in prompt_scores:
            tensors += scores.tensors()
        self._download = Download(tensors)

    def wait(self) -> Sampled:
        """Block until the device has finished the step."""
        arrived = self._download.wait()
        tokens = [LAST] * self._num_rows
        logprobs: list[TokenLogprob | None] | None = None
        errors: dict[int, str] = {}
        drawn = self._drawn
        if drawn is not None:
            for row, token, usable in zip(
                self._rows, arrived[0].tolist(), arrived[1].tolist(), strict=True
            ):
                tokens[row] = token
                if not usable:
                    errors[row] = "the model's output is not a number for this request"
            arrived = arrived[2:]
            if drawn.scores is not None:
                logprobs = [None] * self._num_rows
                found = token_logprobs(arrived[:4], drawn.widths)
                for index, scored in zip(drawn.scored, found, strict=True):
                    row = self._rows[index]
                    logprobs[row] = None if row in errors else scored
                arrived = arrived[4:]
        return Sampled(tokens, logprobs, self._prompt_logprobs(arrived), errors)

    def _prompt_logprobs(self, arrived: list[Tensor]) -> list[list[TokenLogprob] | None] | None:
        if not self._prompt_scores:
            return None
        rows: list[list[TokenLogprob] | None] = [None] * self._num_rows
        for index, (row, width, _) in enumerate(self._prompt_scores):
            piece = arrived[4 * index : 4 * index + 4]
            found = token_logprobs(piece, [width] * len(piece[0]))
            before = rows[row]
            rows[row] = found if before is None else before + found
        return rows
