"""Latency and throughput of chunked prefill policies, on a simulated device.

    python -m benchmarks.schedule.bench_schedule                    the table of loads and targets
    python -m benchmarks.schedule.bench_schedule --targets 15 20 30 --loads 128

The scheduler and its step time model are the real ones; the device is a clock that advances by the
time of a step of Qwen3-8B in bfloat16 on one H100: GEMMs by their measured times, attention by
bytes and operations.  Compute slows down with the recent share of compute, since the GPU then
reaches its power limit.  Clients run a closed loop.  Times vary by a seeded noise of 3 % and, with
--stalls, steps that take five times as long.
"""

from __future__ import annotations

import argparse
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from benchmarks.schedule.host_step import MAX_TOKENS, fake_config
from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.scheduler.step_time import StepLoad
from runtime.startup.engine_spec import TILE, full_wave_sizes

# Tokens of a step -> milliseconds of its GEMMs on one H100 for a moment: few tokens by
# bench_step, many by the faster way for each size, and the output layer.
GEMMS = (
    (1, 4.8), (8, 4.7), (32, 5.2), (64, 5.7), (128, 6.0), (256, 6.8), (384, 8.5), (512, 10.1),
    (640, 13.3), (768, 15.3), (896, 18.7), (1024, 19.3), (1152, 22.4), (1280, 24.4), (1408, 26.1),
    (1536, 28.8), (1664, 32.5), (1792, 34.4), (1920, 35.9), (2048, 37.4), (3072, 56.0),
    (4096, 74.8), (8192, 149.1),
)  # fmt: skip
MANY = 256  # tokens: from here on GEMMs compute for longer than they read
FIXED_MS = 0.35  # what the small kernels of a step take whatever its size
SMALL_MS = 0.0011  # and for each token
MIXED_MS = 0.3  # gaps, where prompts are part of a step
KV_BYTES = 147_456  # a token
BYTES_A_MS = 2.7e9
PAIR_OPERATIONS = 589_824  # of a prompt token with one before it
OPERATIONS_A_MS = 5.5e11
# At the limit of power, what computes takes so much longer for each part of the time above
# UNHINDERED that was computed lately.
SLOWER = 0.26
OVERLAP_SHARE = 0.45
LATELY_MS = 300.0
WARM_UP = 8  # callers
LOADS = (
    (8, 1024, 256), (32, 1024, 256), (128, 1024, 256), (256, 1024, 256), (32, 4096, 8),
    (8, 16384, 128),
)  # fmt: skip


def gemms_ms(tokens: int) -> float:
    if tokens > MANY:
        tokens = -(-tokens // TILE) * TILE
    place = min(max(1, bisect_right(GEMMS, (tokens, 1e9))), len(GEMMS) - 1)
    (few, low), (many, high) = GEMMS[place - 1], GEMMS[place]
    return low + (high - low) * (tokens - few) / (many - few)


class StepParts(NamedTuple):
    """Milliseconds of a step."""

    computing: float
    reading: float


def parts_of(load: StepLoad) -> StepParts:
    """A step of a Qwen3-8B on one H100 that is far from the limit of its power."""
    tokens = load.rows + load.prompt_tokens
    gemms = gemms_ms(tokens)
    pairs = load.pairs * PAIR_OPERATIONS / OPERATIONS_A_MS
    reading = FIXED_MS + SMALL_MS * tokens + MIXED_MS * (load.prompt_tokens > 0)
    reading += load.kv_tokens * KV_BYTES / BYTES_A_MS
    if tokens > MANY:
        return StepParts(gemms + pairs, reading)
    return StepParts(pairs, gemms + reading)


def step_ms(load: StepLoad) -> float:
    return sum(parts_of(load))


def load_of(batch: Batch) -> StepLoad:
    rows = batch.decode_rows
    starts, counts = batch.starts[rows:], batch.q_lens[rows:]
    pairs = float((counts * (starts + counts / 2)).sum())
    return StepLoad(rows, batch.num_tokens - rows, int(batch.starts[:rows].sum()), pairs)


class SimulatedClock:
    """The device's time, in seconds; the host takes none."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimulatedResult:
    """A step whose results are there at `at`."""

    clock: SimulatedClock
    at: float
    sampled: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        self.clock.now = max(self.clock.now, self.at)
        return self.sampled


class SimulatedDevice:
    """Runs one step after the other, each as long as it should take."""

    overlap = True

    def __init__(self, clock: SimulatedClock, seed: int, stalls: float) -> None:
        self._clock = clock
        self._rng = random.Random(seed)
        self._stalls = stalls
        self._free_at = 0.0
        self._computed = OVERLAP_SHARE  # part of the time, lately
        self.step_seconds: list[tuple[StepLoad, float]] = []

    def forward(self, batch: Batch) -> None:
        load = load_of(batch)
        seconds = self._step_ms(load) / 1000 * self._rng.uniform(0.97, 1.03)
        if self._rng.random() < self._stalls:
            seconds *= 5
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.step_seconds.append((load, seconds))

    def _step_ms(self, load: StepLoad) -> float:
        computing, reading = parts_of(load)
        computing *= 1 + SLOWER * max(0.0, self._computed - OVERLAP_SHARE)
        total = computing + reading
        share = 1 - math.exp(-total / LATELY_MS)
        self._computed += share * (computing / total - self._computed)
        return total

    def prepare(self) -> bool:
        return False

    def sample(self, batch: Batch, masks: Masks | None = None) -> SimulatedResult:
        sampled = ModelRunnerOutput(np.where(batch.sample, 1, -1).astype(np.int32)[:, None])
        return SimulatedResult(self._clock, self._free_at, sampled)


@dataclass
class LatencyStats:
    output_tokens: int = 0
    first: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    most_prompt_tokens: int = 0

    def row(self) -> str:
        per_second = self.output_tokens / self.seconds
        return (
            f"{per_second:>10.0f} {_ms(self.gaps, 0.5):>9.1f} {_ms(self.gaps, 0.99):>9.1f} "
            f"{_ms(self.gaps, 1.0):>9.1f} {_ms(self.first, 0.5):>10.0f} "
            f"{_ms(self.first, 0.99):>10.0f} {self.most_prompt_tokens:>8}"
        )


def _ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class LoadClients:
    """A closed loop: each caller sends its next request when its last one was answered."""

    def __init__(self, engine: Engine, clock: SimulatedClock, inputs: int, outputs: int) -> None:
        self._engine = engine
        self._clock = clock
        self._inputs = inputs
        self._outputs = outputs
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.num_sent = 0
        self.num_answered = 0
        self.figures = LatencyStats()

    def send(self) -> None:
        params = SamplingParams(max_tokens=self._outputs)
        tokens = [self.num_sent % 1000] * self._inputs
        self._sent[self.num_sent] = self._clock.now
        self._engine.add(EngineRequest(self.num_sent, 0, tokens, params))
        self.num_sent += 1

    def step(self) -> int:
        """One step of the engine.  Returns how many answers it ended."""
        ended = 0
        for output in self._engine.step():
            now, before = self._clock.now, self._last.get(output.id)
            self.figures.output_tokens += len(output.tokens)
            if before is None:
                self.figures.first.append(now - self._sent[output.id])
            else:
                self.figures.gaps.append(now - before)
            self._last[output.id] = now
            if output.finish is not None:
                del self._last[output.id], self._sent[output.id]
                ended += 1
        self.num_answered += ended
        return ended


def h100_config(longest: int, target_ms: float = 0.0) -> ResolvedConfig:
    """What a start of Qwen3-8B on one H100 of 80 GB resolves to, for requests of so many tokens."""
    return structs.replace(
        fake_config(256, longest),
        device="cuda", prefix_cache=False, itl_target_ms=target_ms,
        num_pages=386_272 // 16, full_wave_sizes=full_wave_sizes((12_288, 4096), 132, MAX_TOKENS),
    )  # fmt: skip


def _warm_up(engine: Engine, clock: SimulatedClock, inputs: int, outputs: int) -> None:
    """As `wavefill bench serve` does, so that the engine has run steps with and without prompts."""
    callers = LoadClients(engine, clock, inputs, outputs)
    for _ in range(WARM_UP):
        callers.send()
    while callers.num_answered < WARM_UP:
        callers.step()


def simulate(
    clients: int,
    inputs: int,
    outputs: int,
    *,
    target_ms: float,
    stalls: float = 0.0,
    rounds: int,
    whole: bool = False,
) -> LatencyStats:
    """`rounds` answers for each caller; the first two of them are not counted, unless `whole`."""
    clock = SimulatedClock()
    device = SimulatedDevice(clock, clients, stalls)
    config = h100_config(inputs + outputs + 1, target_ms)
    engine = Engine(config, 1000, device, clock=clock)
    _warm_up(engine, clock, inputs, outputs)
    callers = LoadClients(engine, clock, inputs, outputs)
    for _ in range(clients):
        callers.send()
    began, counted_from = (clock.now if whole else 0.0), len(device.step_seconds)
    while callers.num_answered < clients * rounds:
        for _ in range(callers.step()):
            if not whole or callers.num_sent < clients * rounds:
                callers.send()
        if not whole and not began and callers.num_answered >= 2 * clients:
            began, callers.figures = clock.now, LatencyStats()
            counted_from = len(device.step_seconds)
    figures = callers.figures
    figures.seconds = clock.now - began
    mixed = [load for load, _ in device.step_seconds[counted_from:] if load.rows]
    figures.most_prompt_tokens = max((load.prompt_tokens for load in mixed), default=0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--targets", type=float, nargs="+", default=[1e6, 0.0, 15.0, 25.0, 40.0])
    parser.add_argument("--loads", type=int, nargs="+", help="numbers of clients", default=[])
    parser.add_argument("--stalls", type=float, default=0.0, help="share of steps 5 times as long")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--whole", action="store_true", help="measure from the first request to the last answer"
    )
    arguments = parser.parse_args()
    print(
        f"{'clients':>7} {'in/out':>10} {'target ms':>10} {'out tok/s':>10} {'ITL p50':>9} "
        f"{'p99':>9} {'most':>9} {'TTFT p50':>10} {'p99':>10} {'chunk':>8}"
    )
    for clients, inputs, outputs in LOADS:
        if arguments.loads and clients not in arguments.loads:
            continue
        for target in arguments.targets:
            figures = simulate(
                clients, inputs, outputs,
                target_ms=target, stalls=arguments.stalls, rounds=arguments.rounds,
                whole=arguments.whole,
            )  # fmt: skip
            name = "automatic" if not target else "none" if target >= 1e6 else f"{target:g}"
            print(f"{clients:>7} {inputs:>6}/{outputs:<3} {name:>10} {figures.row()}")


if __name__ == "__main__":
    main()
