"""What executors need of a model, and what start-up needs of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from attention.kv_pool import KVPool
from model_zoo.inputs import ModelInput
from runtime.executor.announced import Announce
from runtime.executor.pending import DevicePendingOutput
from runtime.scheduler.batch import Batch, Masks
from runtime.stats import GraphCounts, ImageCounts


class ModelProtocol(Protocol):
    def __call__(self, inp: ModelInput) -> Tensor:
        """Hidden states [R, hidden] of inp.ends, or [T, hidden] of all tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], which the caller may overwrite."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """A context in which the model runs its first layers alone."""
        ...


class DeviceExecutor(Protocol):
    """An Executor (runtime/engine/loop.py) that start-up can size: TorchExecutor, GraphExecutor."""

    overlap: bool
    graph_counts: GraphCounts
    image_counts: ImageCounts
    announce: Announce | None  # called with each step, sampling and capture before it is run

    def forward(self, batch: Batch) -> None: ...

    def sample(self, batch: Batch, masks: Masks | None = None) -> DevicePendingOutput: ...

    def prepare(self) -> bool: ...

    def follow(self, announced: object) -> None:
        """Do what the executor of rank 0 has announced."""
        ...

    def use(self, kv: KVPool) -> None:
        """Switch to another KV pool, after memory profiling on a small one."""
        ...

    def step_times(self, batch: Batch, choices: Sequence[Callable[[], None]]) -> list[float]:
        """Microseconds of the batch's step after each of `choices` has been called, by CUDA graphs
        that are replayed in turns and dropped: infinite where none can be captured, and none at
        all if it cannot after the first call.

        Before other graphs are captured.
        """
        ...

    def measure_graphs(self) -> int:
        """The bytes of all CUDA graphs; 0 if there are none.  Raises only out-of-memory errors."""
        ...

    @property
    def launch_bound_tokens(self) -> int:
        """The tokens of a step that the device computes for as long as the host takes to launch its
        kernels, by measure_graphs; 0: unknown."""
        ...

    def extend_graphs(self, tokens: int) -> bool:
        """Let steps of up to so many tokens have graphs, too.  False: all that may have one do."""
        ...

    def capture_startup_set(self) -> None:
        """Capture the graphs that a server has before its first request."""
        ...
