"""A queued step: its outputs, on their way to the host, and how long the GPU takes.

The host reads the results of a step after it has queued the next one.  If that takes longer than
the step, as it does where the next one runs stages of the image encoder without a CUDA graph, the
host reads them late, and by its clock the step would have taken the time of queueing another:
StepClock asks the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.prompt_outputs import StepPromptOutputs
from runtime.executor.transfers import Download, upload
from runtime.messages import TokenLogprob
from runtime.sampling.logprobs import token_logprobs
from runtime.sampling.sampler import SamplerOutput
from runtime.scheduler.batch import LAST, Batch, ModelRunnerOutput

MAX_IN_FLIGHT = 4  # steps whose results have not been read; an engine has two at most
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


class PrefillCheck:
    """RowOutputs of steps without a graph: whether rows that only prefill are free of NaN.

    The last token of a chunk attends to all others in every layer: a NaN among the keys or values
    that the chunk stored is in that token's hidden state, too.

    tokens [B] int32, all LAST; usable [B] int8, 1 in rows that sample.  Valid after wait().
    """

    def __init__(self, batch: Batch, hidden: Tensor) -> None:
        """hidden [B, hidden]: of each row's last token."""
        self.tokens: NDArray[np.int32] = np.full(len(batch.slots), LAST, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.ones(len(batch.slots), dtype=np.int8)
        self._rows = (~batch.sample).nonzero()[0]
        self._download: Download | None = None
        if len(self._rows):
            states = hidden.index_select(0, upload(self._rows, hidden.device))
            self._download = Download([states.isfinite().all(-1)], hidden.device)

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._download is not None:
            [finite] = self._download.wait()
            self.usable[self._rows] = finite.numpy()


class DeviceEvent(Protocol):
    """A CUDA event with timing."""

    def record(self) -> None: ...

    def query(self) -> bool: ...  # whether it has happened

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any, /) -> float: ...  # another event of its type


Event = TypeVar("Event", bound=DeviceEvent)


class StepClock(Generic[Event]):
    """Of steps that are queued one after the other.  A GPU takes microseconds for an event: while
    the step before runs, its end is where the next one begins."""

    def __init__(self, new_event: Callable[[], Event] | None) -> None:
        """None: steps are not timed"""
        self._begins: list[Event] = []
        self._ends: list[Event] = []
        if new_event is not None:
            self._begins = [new_event() for _ in range(MAX_IN_FLIGHT)]
            self._ends = [new_event() for _ in range(MAX_IN_FLIGHT)]
        self._steps = 0
        self._began: Event | None = None
        self._ended: Event | None = None  # of the last step

    @staticmethod
    def of(device: torch.device) -> StepClock[torch.cuda.Event]:
        """Of a GPU's current stream; a CPU has none."""
        if device.type != "cuda":
            return StepClock(None)
        return StepClock(lambda: torch.cuda.Event(enable_timing=True))

    def begin(self) -> None:
        """Before anything of a step is queued: it begins then, or when the one before has ended."""
        if not self._begins:
            return
        self._steps += 1
        if self._ended is not None and not self._ended.query():
            self._began = self._ended
            return
        self._began = self._begins[self._steps % MAX_IN_FLIGHT]
        self._began.record()

    def end(self, ended: Event | None = None) -> StepSpan | None:
        """When all of the step that begin() began is queued.

        ended: an event that is recorded after it; None: one is recorded here
        """
        if not self._begins:
            return None
        if ended is None:
            ended = self._ends[self._steps % MAX_IN_FLIGHT]
            ended.record()
        assert self._began is not None
        self._ended = ended
        return StepSpan(self._began, ended)


class StepSpan:
    """The time of one step, until MAX_IN_FLIGHT - 1 more have ended."""

    def __init__(self, began: DeviceEvent, ended: DeviceEvent) -> None:
        self._began, self._ended = began, ended

    def seconds(self) -> float:
        """Blocks until the device has finished the step."""
        if not self._ended.query():
            self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1000


class DevicePendingOutput:
    def __init__(
        self,
        num_rows: int,
        row_outputs: RowOutputs,
        sampler_outputs: list[SamplerOutput],
        prompt_outputs: StepPromptOutputs | None,
        device: torch.device,
        span: StepSpan | None = None,
    ) -> None:
        """row_outputs: those of the step itself; the others are of work queued after it.

        span: of the step itself; None: it is not timed
        """
        self._num_rows, self._span = num_rows, span
        self._row_outputs = row_outputs
        self._sampler_outputs = sampler_outputs
        self._prompt_outputs = prompt_outputs
        tensors = [tensor for output in sampler_outputs for tensor in output.tensors()]
        if prompt_outputs is not None:
            tensors += prompt_outputs.tensors()
        self._download = Download(tensors, device) if tensors else None

    def wait(self) -> ModelRunnerOutput:
        """Block until the device has finished the step."""
        self._row_outputs.wait()
        tokens = self._row_outputs.tokens[: self._num_rows].copy()
        unusable = np.flatnonzero(self._row_outputs.usable[: self._num_rows] == 0)
        errors = dict.fromkeys(unusable.tolist(), NOT_FINITE)
        if self._download is None:
            return ModelRunnerOutput(tokens[:, None], errors=errors, seconds=self._seconds())
        arrived = iter(self._download.wait())
        logprobs: list[list[TokenLogprob] | None] = [None] * self._num_rows
        for output in self._sampler_outputs:
            self._read(output, arrived, tokens, errors, logprobs)
        prompt_logprobs: list[list[TokenLogprob] | None] | None = None
        embeddings: dict[int, bytes] = {}
        if self._prompt_outputs is not None:
            prompt_logprobs = self._prompt_outputs.logprobs(arrived, self._num_rows)
            for row, embedding, finite in self._prompt_outputs.pooled(arrived):
                embeddings[row] = embedding
                if not finite:
                    errors[row] = NOT_FINITE
        scored = any(output.scored for output in self._sampler_outputs)
        return ModelRunnerOutput(
            tokens[:, None],
            logprobs if scored else None,
            prompt_logprobs,
            errors,
            embeddings,
            self._seconds(),
        )

    def _seconds(self) -> float | None:
        return None if self._span is None else self._span.seconds()

    def _read(
        self,
        output: SamplerOutput,
        arrived: Iterator[Tensor],
        tokens: NDArray[np.int32],
        errors: dict[int, str],
        logprobs: list[list[TokenLogprob] | None],
    ) -> None:
        """Write the rows of a sampler's output, from host copies of its tensors."""
        copies = [next(arrived) for _ in output.tensors()]
        sampled, usable, *scored = output.arrived(copies)
        for row, token, fine in zip(output.rows, sampled.tolist(), usable.tolist(), strict=True):
            tokens[row] = token
            if not fine:
                errors[row] = NOT_FINITE
        if scored:
            found = token_logprobs(scored, output.widths)
            for row, score in zip(output.scored, found, strict=True):
                logprobs[row] = None if row in errors else [score]
