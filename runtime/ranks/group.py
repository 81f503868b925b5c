"""Ranks: the process group of the processes that share a model, and what they agree on.

Every rank runs the same start, from loading to warm-up, and takes numbers that depend on its own
device or clock from here.  Afterwards rank 0 decides alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from model_zoo.layers.all_reduce.symmetric_buffers import Rendezvous, SymmetricMemory
from model_zoo.parallel.communicator import Alone, Communicator, ProcessGroupCommunicator
from runtime.config import ConfigError
from runtime.memory_plan import MemoryPlan

START_SECONDS = 1800.0  # that ranks may differ while weights are read and kernels are compiled
STALL_SECONDS = 30.0  # in which all ranks must have reached the same sum of a step
# Two GPUs of a host need no multicast, which guests often lack.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank, size; `communicator` is for the model, `control` for numbers of the host.

    rendezvous: how kernels of the ranks come to read each other's memory; None: they do not
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    control: dist.ProcessGroup | None = None
    rendezvous: Rendezvous | None = None

    @classmethod
    def join(cls, rank: int, size: int, store: str, *, device: str, deterministic: bool) -> Ranks:
        """Wait until all ranks have come.

        store: a file that does not exist yet; device: as requested, which takes the GPU of the
        rank's number among those that are visible.  Raises ConfigError if there is none.
        """
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if on_gpu:
            count = torch.cuda.device_count()
            if count < size:
                raise ConfigError(
                    f"--tensor-parallel {size}: PyTorch sees {count} CUDA devices: lower it, or "
                    "let CUDA_VISIBLE_DEVICES name more"
                )
            torch.cuda.set_device(rank)
        elif not dist.is_gloo_available():
            raise ConfigError(
                f"--tensor-parallel {size}: this build of PyTorch has no gloo, by which processes "
                "on a CPU communicate: leave it out"
            )
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # All are on one host: the names of its networks need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=START_SECONDS),
        )
        # Those of a GPU are in graphs, which have no limit: the engine process watches itself.
        seconds = START_SECONDS if on_gpu else STALL_SECONDS
        group = _group("nccl" if on_gpu else "gloo", seconds)
        communicator = ProcessGroupCommunicator(group, in_order=deterministic)
        rendezvous = SymmetricMemory(group) if on_gpu else None
        return cls(rank, size, communicator, _group("gloo", START_SECONDS), rendezvous)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def least(self, *numbers: int) -> list[int]:
        """The least of each number over all ranks; waits for all."""
        return self._reduce(numbers, dist.ReduceOp.MIN)

    def most(self, *numbers: int) -> list[int]:
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks, in their order; waits for all."""
        found: list[Any] = [text] * self.size
        if self.control is not None:
            dist.all_gather_object(found, text, group=self.control)
        return found

    def _reduce(self, numbers: tuple[int, ...], operation: dist.ReduceOp.RedOpType) -> list[int]:
        if self.control is None:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, operation, group=self.control)
        return values.tolist()

    def agree(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan of the rank that has least room."""
        [free] = self.least(plan.free)
        weights, state, activations, graphs, states = self.most(
            plan.weights, plan.state, plan.activations, plan.graphs, plan.sequence_states
        )
        return MemoryPlan(
            free=free,
            share=plan.share,
            weights=weights,
            state=state,
            activations=activations,
            graphs=graphs,
            sequence_states=states,
        )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Rank 0 first, then the others, without communication: to compile what rank 0 has put
        into the cache of kernels."""
        communicator = self.communicator
        if not isinstance(communicator, ProcessGroupCommunicator):
            yield
            return
        if not self.leads:
            self.least(0)
        assert communicator.fused is None, "kernels would wait for other ranks"
        communicator.is_silent = True
        try:
            yield
        finally:
            communicator.is_silent = False
            if self.leads:
                self.least(0)


def is_between_ranks(error: RuntimeError) -> bool:
    """Whether a library that communicates has raised it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _group(backend: str, seconds: float) -> dist.ProcessGroup:
    """A group of all ranks."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


ALONE = Ranks(communicator=Alone())
