"""Pending: a step whose results are on their way to the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.pooling import Pooled
from runtime.executor.prompt_logprobs import PromptScores, prompt_logprobs
from runtime.executor.transfers import Download
from runtime.messages import TokenLogprob
from runtime.sampling.logprobs import token_logprobs
from runtime.sampling.sampler_output import Drawn
from runtime.scheduler.batch import LAST, Sampled

NOT_FINITE = "the model's output is not a number for this request"


class Chosen(Protocol):
    """What a step says of its rows.  Valid after wait()."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...  # LAST where it has chosen none

    @property
    def usable(self) -> NDArray[np.int8]: ...  # 0: what the row has made or stored is no number

    def wait(self) -> None: ...


class Pending:
    def __init__(
        self,
        num_rows: int,
        chosen: Chosen | None,
        drawn_rows: list[int],
        drawn: Drawn | None,
        prompt_scores: list[PromptScores],
        pooled: Pooled | None,
        device: torch.device,
    ) -> None:
        """chosen: tokens that the step itself chose; the other arguments are of the rest.

        drawn_rows: those for which `drawn` has tokens, and behind them any that it only scored
        """
        self._num_rows = num_rows
        self._chosen = chosen
        self._rows = drawn_rows
        self._drawn = drawn
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        tensors: list[Tensor] = []
        if drawn is not None:
            tensors += drawn.tensors()
        for scores in prompt_scores:
            tensors += scores.tensors()
        if pooled is not None:
            tensors.append(pooled.flat)
        self._download = Download(tensors, device) if tensors or chosen is None else None

    def wait(self) -> Sampled:
        """Block until the device has finished the step."""
        tokens, errors = self._own_tokens()
        if self._download is None:
            return Sampled(tokens, errors=errors)
        arrived = self._download.wait()
        logprobs: list[TokenLogprob | None] | None = None
        vectors: dict[int, bytes] = {}
        if self._pooled is not None:
            *arrived, flat = arrived
            for row, vector, finite in self._pooled.arrived(flat):
                vectors[row] = vector
                if not finite:
                    errors[row] = NOT_FINITE
        if self._drawn is not None:
            count = len(self._drawn.tensors())
            chosen, usable, *scored = self._drawn.arrived(arrived[:count])
            arrived = arrived[count:]
            rows = self._rows[: len(chosen)]
            for row, token, fine in zip(rows, chosen.tolist(), usable.tolist(), strict=True):
                tokens[row] = token
                if not fine:
                    errors[row] = NOT_FINITE
            if scored:
                logprobs = self._logprobs(self._drawn, scored, errors)
        scores = prompt_logprobs(self._prompt_scores, arrived, self._num_rows)
        return Sampled(tokens, logprobs, scores, errors, vectors)

    def _own_tokens(self) -> tuple[NDArray[np.int32], dict[int, str]]:
        """By row: LAST where the step chose none, and what went wrong."""
        if self._chosen is None:
            return np.full(self._num_rows, LAST, dtype=np.int32), {}
        self._chosen.wait()
        wrong = np.flatnonzero(self._chosen.usable[: self._num_rows] == 0)
        errors = dict.fromkeys(wrong.tolist(), NOT_FINITE)
        return self._chosen.tokens[: self._num_rows].copy(), errors

    def _logprobs(
        self, drawn: Drawn, arrived: list[Tensor], errors: dict[int, str]
    ) -> list[TokenLogprob | None]:
        rows: list[TokenLogprob | None] = [None] * self._num_rows
        found = token_logprobs(arrived, drawn.widths)
        for index, scored in zip(drawn.scored, found, strict=True):
            row = self._rows[index]
            rows[row] = None if row in errors else scored
        return rows
