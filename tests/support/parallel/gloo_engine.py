"""Engines whose model is divided between this process and another one, on a CPU or two GPUs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch.distributed as dist
from msgspec.structs import replace

from model_zoo.parallel.communicator import ProcessGroupCommunicator
from runtime.config import DeviceName, EngineConfig
from runtime.engine.loop import Engine
from runtime.executor.protocols import DeviceExecutor
from runtime.ipc.broadcast import BroadcastSender, Ends
from runtime.messages import EngineRequest, RequestOutput
from runtime.ranks.group import ALONE, Ranks
from runtime.ranks.messages import encode
from runtime.startup.loading import load
from tests.support.engine.device_engine import FitRules
from tests.support.parallel.mapped_memory import MappedMemory
from tests.support.paths import ROOT

MAX_STEPS = 2000


class TwoRanks:
    """This process is rank 0."""

    def __init__(
        self, folder: Path, device: DeviceName = "cpu", *, fused_sums: bool = False
    ) -> None:
        """fused_sums: the norms of a CPU compute the sums over ranks, on interpreted kernels"""
        self.device: DeviceName = device
        ends, store = Ends.create(1), str(folder / "store")
        self.sender = BroadcastSender(ends, stall_seconds=30)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.parallel.gloo_rank", store, device]
            + [str(end) for end in ends.of_reader(0)]
            + [str(folder)] * fused_sums,
            stdin=subprocess.PIPE,
            pass_fds=ends.of_reader(0),
            cwd=ROOT,
        )
        self.ranks = Ranks.join(0, 2, store, device=device, deterministic=False)
        if fused_sums:
            memory = MappedMemory(folder, 0)
            self.ranks = dataclasses.replace(self.ranks, rendezvous=memory)

    @contextmanager
    def engine(self, config: EngineConfig, grammars: FitRules | None = None) -> Iterator[Engine]:
        assert self._process.stdin is not None
        config = replace(config, tensor_parallel=2)
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        self._process.stdin.flush()
        with engine_of(config, self.ranks, grammars) as (engine, executor):
            executor.announce = lambda step: self.sender.send(encode(step))
            try:
                yield engine
            finally:
                self.sender.send(b"")
                forget_sums(self.ranks)

    def close(self) -> None:
        dist.destroy_process_group()
        self._process.kill()
        self._process.communicate()


def forget_sums(ranks: Ranks) -> None:
    """Before another model is loaded, whose kernels compile without other ranks."""
    if isinstance(ranks.communicator, ProcessGroupCommunicator):
        ranks.communicator.fused = None


@contextmanager
def engine_of(
    config: EngineConfig, ranks: Ranks = ALONE, grammars: FitRules | None = None
) -> Iterator[tuple[Engine, DeviceExecutor]]:
    loaded = load(config, lambda phase, done, total: None, ranks=ranks)
    engine = Engine(
        loaded.resolved,
        loaded.ready.vocab_size,
        loaded.executor,
        grammars=grammars,  # type: ignore[arg-type]
    )
    yield engine, loaded.executor


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    """All outputs of requests that arrive one step after the other."""
    found: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    waiting = list(requests)
    for _ in range(MAX_STEPS):
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            found[output.id].append(output)
        if not waiting and engine.idle:
            return found
    raise AssertionError("the engine does not become idle")
