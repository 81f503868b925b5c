"""Pending: a step whose results are on their way to the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.pooling import PooledRows
from runtime.executor.prompt_logprobs import PromptLogprobsTensors, prompt_logprobs
from runtime.executor.transfers import Download
from runtime.messages import TokenLogprob
from runtime.sampling.logprobs import token_logprobs
from runtime.sampling.sampler_output import SamplerOutput
from runtime.scheduler.batch import LAST, ModelRunnerOutput

NOT_FINITE = "the model's output is not a number for this request"


class RowTokens(Protocol):
    """What a step says of its rows.  Valid after wait()."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...  # LAST where it has chosen none

    @property
    def usable(self) -> NDArray[np.int8]: ...  # 0: what the row has made or stored is no number

    def wait(self) -> None: ...


class DevicePendingOutput:
    def __init__(
        self,
        num_rows: int,
        row_tokens: RowTokens | None,
        sampled_rows: list[int],
        sampler_output: SamplerOutput | None,
        prompt_scores: list[PromptLogprobsTensors],
        pooled: PooledRows | None,
        device: torch.device,
    ) -> None:
        """chosen: tokens that the step itself chose; the other arguments are of the rest.

        sampled_rows: those for which `drawn` has tokens, and behind them any that it only scored
        """
        self._num_rows = num_rows
        self._row_tokens = row_tokens
        self._rows = sampled_rows
        self._sampler_output = sampler_output
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        tensors: list[Tensor] = []
        if sampler_output is not None:
            tensors += sampler_output.tensors()
        for scores in prompt_scores:
            tensors += scores.tensors()
        if pooled is not None:
            tensors.append(pooled.flat)
        self._download = Download(tensors, device) if tensors or row_tokens is None else None

    def wait(self) -> ModelRunnerOutput:
        """Block until the device has finished the step."""
        tokens, errors = self._own_tokens()
        if self._download is None:
            return ModelRunnerOutput(tokens, errors=errors)
        arrived = self._download.wait()
        logprobs: list[TokenLogprob | None] | None = None
        embeddings: dict[int, bytes] = {}
        if self._pooled is not None:
            *arrived, flat = arrived
            for row, embedding, finite in self._pooled.arrived(flat):
                embeddings[row] = embedding
                if not finite:
                    errors[row] = NOT_FINITE
        if self._sampler_output is not None:
            count = len(self._sampler_output.tensors())
            row_tokens, usable, *scored = self._sampler_output.arrived(arrived[:count])
            arrived = arrived[count:]
            rows = self._rows[: len(row_tokens)]
            for row, token, fine in zip(rows, row_tokens.tolist(), usable.tolist(), strict=True):
                tokens[row] = token
                if not fine:
                    errors[row] = NOT_FINITE
            if scored:
                logprobs = self._logprobs(self._sampler_output, scored, errors)
        scores = prompt_logprobs(self._prompt_scores, arrived, self._num_rows)
        return ModelRunnerOutput(tokens, logprobs, scores, errors, embeddings)

    def _own_tokens(self) -> tuple[NDArray[np.int32], dict[int, str]]:
        """By row: LAST where the step chose none, and what went wrong."""
        if self._row_tokens is None:
            return np.full(self._num_rows, LAST, dtype=np.int32), {}
        self._row_tokens.wait()
        wrong = np.flatnonzero(self._row_tokens.usable[: self._num_rows] == 0)
        errors = dict.fromkeys(wrong.tolist(), NOT_FINITE)
        return self._row_tokens.tokens[: self._num_rows].copy(), errors

    def _logprobs(
        self, sampler_output: SamplerOutput, arrived: list[Tensor], errors: dict[int, str]
    ) -> list[TokenLogprob | None]:
        rows: list[TokenLogprob | None] = [None] * self._num_rows
        found = token_logprobs(arrived, sampler_output.widths)
        for index, scored in zip(sampler_output.scored, found, strict=True):
            row = self._rows[index]
            rows[row] = None if row in errors else scored
        return rows
