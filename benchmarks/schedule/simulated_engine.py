"""An engine with a simulated device, behind the real API, scheduler and clients.

    python -m benchmarks.server.bench_loads qwen3-8b --simulated h200 --only c128

Steps take as long as `bench_schedule` simulates for the device, and every token is 1.  This shows
the interaction of a server's parts without a GPU: arrivals of requests, delays of the host, prefill
chunks.  Its figures are no measurement of a GPU.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs

from benchmarks.schedule.device_model import (
    DEVICES,
    DeviceModel,
    SimulatedClock,
    SimulatedDevice,
)
from runtime.config import EngineConfig
from runtime.engine import process
from runtime.messages import Ready
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.startup import loading
from runtime.startup.timeline import Timeline
from runtime.stats import ImageCounts

VOCAB_SIZE = 151_936
HIDDEN_SIZE = 4096
DEVICE_VARIABLE = "WAVEFILL_SIMULATED_DEVICE"  # a name of DEVICES
LONGEST = 32_768  # tokens of a request, without --max-model-len


@dataclass
class DelayedResult:
    """A step whose results are there at `at`, of time.monotonic()."""

    at: float
    sampled: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self.at - time.monotonic()))
        return self.sampled


class DelayedDevice(SimulatedDevice):
    """A device whose steps take their simulated time."""

    def __init__(self, clock: SimulatedClock, model: DeviceModel) -> None:
        super().__init__(clock, 0, model=model)
        self.image_counts = ImageCounts()

    def forward(self, batch: Batch) -> None:
        self._clock.now = time.monotonic()
        super().forward(batch)

    def sample(self, batch: Batch, masks: Masks | None = None) -> DelayedResult:
        sampled = ModelRunnerOutput(np.where(batch.sample, 1, -1).astype(np.int32)[:, None])
        return DelayedResult(self._free_at, sampled)


def load(
    requested: EngineConfig,
    progress: loading.ProgressCallback,
    *,
    epoch: int = 0,
    timeline: Timeline | None = None,
    compilers: object = None,
    ranks: object = None,
    host_free: int = 0,
) -> loading.Loaded:
    """In place of runtime.startup.loading.load: nothing is read."""
    longest = requested.max_model_len or LONGEST
    model = DEVICES[os.environ.get(DEVICE_VARIABLE, "h100")]
    resolved = structs.replace(model.config(longest, requested.itl_target_ms), seed=requested.seed)
    ready = Ready(
        epoch=epoch,
        model_type="qwen3",
        device=f"simulated {model.name}",
        dtype=resolved.dtype,
        attention="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=resolved.max_model_len,
        page_size=resolved.page_size,
        num_pages=resolved.num_pages,
        max_num_seqs=resolved.max_num_seqs,
        max_batched_tokens=resolved.max_batched_tokens,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
        hidden_size=HIDDEN_SIZE,
        memory=[("weights", 0), ("KV", 0)],
        phases=[],
    )
    return loading.Loaded(DelayedDevice(SimulatedClock(), model), resolved, ready)  # type: ignore[arg-type]


def main(arguments: list[str]) -> None:
    """Run `wavefill` with this engine."""
    from server.cli import main
    from server.process import launcher

    # The engine process imports this file from any working directory.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    launcher.launch = partial(launcher.launch, engine_module="benchmarks.schedule.simulated_engine")
    main.main(arguments)


if __name__ == "__main__":
    loading.load = load
    process.main()
