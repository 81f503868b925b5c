"""DevicePendingOutput: a queued step whose outputs are being copied to the host."""

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


class RowOutputs(Protocol):
    """Tokens and usable flags of a step's rows, on the host.  Valid after wait()."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...  # LAST where none was sampled

    @property
    def usable(
        self,
    ) -> NDArray[np.int8]: ...  # 0: NaN or +inf in its logits, or NaN in its hidden state

    def wait(self) -> None: ...


class DevicePendingOutput:
    def __init__(
        self,
        num_rows: int,
        row_outputs: RowOutputs | None,
        sampled_rows: list[int],
        sampler_output: SamplerOutput | None,
        prompt_scores: list[PromptLogprobsTensors],
        pooled: PooledRows | None,
        device: torch.device,
    ) -> None:
        """row_outputs: those of the step itself; the other arguments are of work queued after it.

        sampled_rows: the rows of sampler_output's tokens, followed by any that it only scored
        """
        self._num_rows = num_rows
        self._row_outputs = row_outputs
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
        self._download = Download(tensors, device) if tensors or row_outputs is None else None

    def wait(self) -> ModelRunnerOutput:
        """Block until the device has finished the step."""
        tokens, errors = self._graph_outputs()
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
            sampled, usable, *scored = self._sampler_output.arrived(arrived[:count])
            arrived = arrived[count:]
            rows = self._rows[: len(sampled)]
            for row, token, fine in zip(rows, sampled.tolist(), usable.tolist(), strict=True):
                tokens[row] = token
                if not fine:
                    errors[row] = NOT_FINITE
            if scored:
                logprobs = self._logprobs(self._sampler_output, scored, errors)
        scores = prompt_logprobs(self._prompt_scores, arrived, self._num_rows)
        return ModelRunnerOutput(tokens, logprobs, scores, errors, embeddings)

    def _graph_outputs(self) -> tuple[NDArray[np.int32], dict[int, str]]:
        """The step's tokens by row, LAST where it sampled none, and errors by row."""
        if self._row_outputs is None:
            return np.full(self._num_rows, LAST, dtype=np.int32), {}
        self._row_outputs.wait()
        wrong = np.flatnonzero(self._row_outputs.usable[: self._num_rows] == 0)
        errors = dict.fromkeys(wrong.tolist(), NOT_FINITE)
        return self._row_outputs.tokens[: self._num_rows].copy(), errors

    def _logprobs(
        self, sampler_output: SamplerOutput, arrived: list[Tensor], errors: dict[int, str]
    ) -> list[TokenLogprob | None]:
        rows: list[TokenLogprob | None] = [None] * self._num_rows
        found = token_logprobs(arrived, sampler_output.widths)
        for index, scored in zip(sampler_output.scored, found, strict=True):
            row = self._rows[index]
            rows[row] = None if row in errors else scored
        return rows
