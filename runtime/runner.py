"""Runner: one rank.  Runs batches through the model and keeps what the device must remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from model_zoo.inputs import ModelInput
from runtime.batch import LAST, Batch, Masks, Sampled
from runtime.config import Resolved
from runtime.device import Download, upload
from runtime.inputs import build_input
from runtime.messages import TokenLogprob
from runtime.pooling import Pooled
from runtime.sampler import Allowed, Drawn, draw
from runtime.scores import Scores, score, token_logprobs
from runtime.slots import Slots

NOT_FINITE = "the model's output is not a number for this request"
PROMPT_PIECE = 128  # prompt tokens scored at a time: logits of a long prompt would be gigabytes


class Model(Protocol):
    def __call__(self, inp: ModelInput) -> Tensor: ...  # [T, hidden]

    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, hidden] -> [R, vocab], may be overwritten


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
        self._prompt_scores: list[PromptScores] = []
        self._pooled: Pooled | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> None:
        """Store the keys and values of the batch's tokens; make the logits of rows that sample."""
        self._slots.begin(batch)
        inp = build_input(batch, self._slots, self._kv, self._backend)
        hidden = self._model(inp)
        self._prompt_scores = self._score_prompts(batch, hidden)
        self._pooled = self._slots.pools.take(batch, hidden)
        self._logits = None
        if len(inp.logit_rows):
            self._logits = self._model.logits(hidden[inp.logit_rows]).float()

    @torch.inference_mode()
    def sample(self, batch: Batch, masks: Masks | None = None) -> Pending:
        """Choose the tokens of the rows that sample; `masks` limit some of them."""
        drawn: Drawn | None = None
        rows = np.flatnonzero(np.asarray(batch.sample, dtype=np.bool_))
        if self._logits is not None:
            slot_ids = np.asarray(batch.slots, dtype=np.int64)[rows]
            ends = np.asarray(batch.starts, dtype=np.int64) + np.asarray(batch.q_lens)
            allowed = None if masks is None else _allowed(masks, rows)
            drawn = draw(self._logits, self._slots, slot_ids, ends[rows], allowed)
            self._logits = None
        scores, self._prompt_scores = self._prompt_scores, []
        pooled, self._pooled = self._pooled, None
        return Pending(len(batch.slots), rows.tolist(), drawn, scores, pooled, self.device)

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[PromptScores]:
        """Scores of the prompt tokens that the batch feeds, for the rows that want them."""
        wanted = self._slots.params["prompt_logprobs"][batch.slots]
        if (wanted < 0).all():
            return []
        scores: list[PromptScores] = []
        ends = np.cumsum(batch.q_lens)
        for row in np.flatnonzero(wanted >= 0).tolist():
            fed = min(batch.q_lens[row], self._prompt_left(batch, row))
            if fed > 0:
                first, width = int(ends[row]) - batch.q_lens[row], int(wanted[row])
                tokens, states = batch.tokens[first : first + fed], hidden[first : first + fed]
                pieces = self._score(batch.slots[row], states, tokens, width)
                scores.append(PromptScores(row, width, pieces))
        return scores

    def _prompt_left(self, batch: Batch, row: int) -> int:
        """Prompt tokens from the row's first on."""
        return int(self._slots.params["prompt_len"][batch.slots[row]]) - batch.starts[row]

    def _score(self, slot: int, states: Tensor, tokens: list[int], width: int) -> list[Scores]:
        """Score each token by the hidden state before it, the first by that of the last chunk."""
        before, self._slots.before[slot] = self._slots.before[slot], states[-1:].clone()
        if before is not None:
            states = torch.cat([before, states])
        else:
            tokens = tokens[1:]  # nothing comes before a prompt's first token
        if not tokens:
            return []
        targets = upload(np.asarray(tokens, dtype=np.int64), self.device)
        return [
            score(
                self._model.logits(
                    states[first : first + PROMPT_PIECE][: len(tokens) - first]
                ).float(),
                targets[first : first + PROMPT_PIECE],
                width,
            )
            for first in range(0, len(tokens), PROMPT_PIECE)
        ]


def _allowed(masks: Masks, sampling: NDArray[np.int64]) -> Allowed:
    """`masks` by rows of the logits, which hold only the rows that sample."""
    rows = np.searchsorted(sampling, np.asarray(masks.rows, dtype=np.int64))
    bits = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(rows), -1)
    return Allowed(rows, bits)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt tokens that one row fed, in pieces."""

    row: int
    width: int
    pieces: list[Scores]


class Pending:
    """A step whose results are on their way to the host."""

    def __init__(
        self,
        num_rows: int,
        sampled_rows: list[int],
        drawn: Drawn | None,
        prompt_scores: list[PromptScores],
        pooled: Pooled | None,
        device: torch.device,
    ) -> None:
        self._num_rows = num_rows
        self._rows = sampled_rows
        self._drawn = drawn
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        tensors: list[Tensor] = []
        if drawn is not None:
            tensors += [drawn.tokens, drawn.usable]
            tensors += drawn.scores.tensors() if drawn.scores is not None else []
        for scores in prompt_scores:
            for piece in scores.pieces:
                tensors += piece.tensors()
        if pooled is not None:
            tensors.append(pooled.flat)
        self._download = Download(tensors, device)

    def wait(self) -> Sampled:
        """Block until the device has finished the step."""
        arrived = self._download.wait()
        tokens = [LAST] * self._num_rows
        logprobs: list[TokenLogprob | None] | None = None
        errors: dict[int, str] = {}
        vectors: dict[int, bytes] = {}
        if self._pooled is not None:
            *arrived, flat = arrived
            for row, vector, finite in self._pooled.arrived(flat):
                vectors[row] = vector
                if not finite:
                    errors[row] = NOT_FINITE
        if self._drawn is not None:
            chosen, usable, *arrived = arrived
            for row, token, fine in zip(self._rows, chosen.tolist(), usable.tolist(), strict=True):
                tokens[row] = token
                if not fine:
                    errors[row] = NOT_FINITE
            if self._drawn.scores is not None:
                logprobs = self._logprobs(self._drawn, arrived[:4], errors)
                arrived = arrived[4:]
        return Sampled(tokens, logprobs, self._prompt_logprobs(arrived), errors, vectors)

    def _logprobs(
        self, drawn: Drawn, arrived: list[Tensor], errors: dict[int, str]
    ) -> list[TokenLogprob | None]:
        rows: list[TokenLogprob | None] = [None] * self._num_rows
        found = token_logprobs(arrived, drawn.widths)
        for index, scored in zip(drawn.scored, found, strict=True):
            row = self._rows[index]
            rows[row] = None if row in errors else scored
        return rows

    def _prompt_logprobs(self, arrived: list[Tensor]) -> list[list[TokenLogprob] | None] | None:
        if not self._prompt_scores:
            return None
        rows: list[list[TokenLogprob] | None] = [None] * self._num_rows
        for scores in self._prompt_scores:
            found: list[TokenLogprob] = []
            for _ in scores.pieces:
                piece, arrived = arrived[:4], arrived[4:]
                found += token_logprobs(piece, [scores.width] * len(piece[0]))
            rows[scores.row] = found
        return rows
