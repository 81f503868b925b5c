"""An engine on a simulated device, on whose clock every step takes what it would on an H100."""

from __future__ import annotations

from msgspec import structs

from benchmarks.schedule.device_model import SimulatedClock, SimulatedDevice, load_of
from benchmarks.schedule.host_step import fake_config
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from runtime.scheduler.batch import Batch
from runtime.scheduler.step_time import StepLoad

# The records of 20,000 pages take longer to compare than many steps; what is wrong stays wrong.
CHECKED_STEPS = 16


class SimulatedServer:
    """An engine on a simulated device, and what it has done."""

    def __init__(
        self,
        *,
        target_ms: float = 0.0,
        device: str = "cuda",
        stalls: float = 0.0,
        num_pages: int = 20_000,
        max_num_seqs: int = 256,
    ) -> None:
        self.clock = SimulatedClock()
        config = structs.replace(
            fake_config(max_num_seqs, 20_000),
            device=device, itl_target_ms=target_ms, num_pages=num_pages, prefix_cache=False,
        )  # fmt: skip
        self.device = SimulatedDevice(self.clock, 1, stalls)
        self.engine = Engine(config, 1000, self.device, clock=self.clock)
        self.batches: list[Batch] = []
        self.outputs: list[RequestOutput] = []
        self.first: dict[int, float] = {}
        self._steps = 0
        self._forward = self.device.forward
        self.device.forward = self._note  # type: ignore[method-assign]

    def _note(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._forward(batch)

    def add(self, id: int, length: int, max_tokens: int = 100, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.engine.add(EngineRequest(id, 0, [id % 900 + 1] * length, params, priority))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.outputs.append(output)
                self.first.setdefault(output.id, self.clock.now)
            self._steps += 1
            if self._steps % CHECKED_STEPS == 0:
                self.engine.requests.check_integrity()
        if count > 1 or self.engine.idle:
            self.engine.requests.check_integrity()

    def run(self) -> None:
        for _ in range(20_000):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("no end in sight")


def mixed(batches: list[Batch]) -> list[StepLoad]:
    loads = [load_of(batch) for batch in batches]
    return [load for load in loads if load.rows and load.prompt_tokens]


def warmed(server: SimulatedServer, rows: int) -> None:
    """`rows` sequences that decode for long, and a few prompts to learn from."""
    for id in range(rows):
        server.add(id, 500, max_tokens=1000)
    for id in range(1000, 1010):
        server.add(id, 6000, max_tokens=2)
        server.step(8)
    while server.engine.requests.prefilling or server.engine.requests.waiting.count:
        server.step()
    server.engine.requests.mix.record(0, 0, 1_000_000)  # as if prompts had been short until now
    server.batches.clear()
