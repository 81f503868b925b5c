"""SimulatedDevice: a clock that advances by the time of a step of a model on a device.

A step's GEMMs take what was measured with Qwen3-8B in bfloat16 on one H100, scaled to other devices
and models by how long they read the weights and compute a token; attention goes by bytes and
operations.  Compute slows down with the recent share of compute, since a GPU then reaches its power
limit.  Times vary by a seeded noise of 3 % and, if asked for, some steps take five times as long.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import structs

from benchmarks.images.bench_encoder import published
from benchmarks.schedule.host_step import MAX_TOKENS, fake_config
from runtime.config import ResolvedConfig
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.scheduler.step_time import StepLoad
from runtime.startup.engine_spec import TILE, full_wave_sizes
from runtime.stats import GraphCounts

# Tokens of a step -> milliseconds of its GEMMs on one H100 for a moment: few tokens by
# bench_step, many by the faster way for each size, and the output layer.
H100_GEMMS = (
    (1, 4.8), (8, 4.7), (32, 5.2), (64, 5.7), (128, 6.0), (256, 6.8), (384, 8.5), (512, 10.1),
    (640, 13.3), (768, 15.3), (896, 18.7), (1024, 19.3), (1152, 22.4), (1280, 24.4), (1408, 26.1),
    (1536, 28.8), (1664, 32.5), (1792, 34.4), (1920, 35.9), (2048, 37.4), (3072, 56.0),
    (4096, 74.8), (8192, 149.1),
)  # fmt: skip
UNHINDERED_SHARE = 0.45  # of a device's time, computed lately: more of it slows compute down
LATELY_MS = 300.0
SEQS = 256
PAGE_SIZE = 16
ENCODER = published()
ENCODER_FIELDS = {
    "image_token_side": ENCODER.token_side,
    "image_token_bytes": 2 * ENCODER.feature_size,
    "encoder_stages": ENCODER.stage_operations,
}


class StepParts(NamedTuple):
    """Milliseconds of a step."""

    computing: float
    reading: float


class EncoderTimes(NamedTuple):
    """Of the encoder of Qwen3-VL-8B: 27 blocks and a merger."""

    operations_per_ms: float  # 10^9
    stage_ms: float  # that its kernels take to be launched

    def ms(self, num_tokens: int, first: int, end: int) -> float:
        return sum(
            max(self.stage_ms, num_tokens * (linear + num_tokens * pair) / self.operations_per_ms)
            for linear, pair in ENCODER.stage_operations[first:end]
        )


@dataclass(frozen=True)
class DeviceModel:
    """A model on a device, by what its steps take."""

    name: str
    weights_ms: float  # to read them once
    token_us: float  # of GEMMs, for each of many tokens
    kv_bytes: int  # a token
    bytes_per_ms: float  # of KV
    pair_operations: float  # of a prompt token with one before it
    operations_per_ms: float
    fixed_ms: float  # what the small kernels of a step take whatever its size
    small_ms: float  # and for each token
    mixed_ms: float  # gaps, where prompts are part of a step
    slowdown: float  # of compute, for each part of the time above UNHINDERED_SHARE
    kv_tokens: int
    widths: tuple[int, ...] = (12_288, 4096)  # outputs of the GEMMs
    processors: int = 132
    encoder: EncoderTimes | None = None  # of a model that reads images

    def gemms_ms(self, tokens: int) -> float:
        """Of a step of `tokens`, which are padded to whole tiles where there are many."""
        h100 = H100
        if tokens > 2 * TILE:
            tokens = -(-tokens // TILE) * TILE
        index = min(max(1, bisect_right(H100_GEMMS, (tokens, 1e9))), len(H100_GEMMS) - 1)
        (few, low), (many, high) = H100_GEMMS[index - 1], H100_GEMMS[index]
        there = low + (high - low) * (tokens - few) / (many - few)
        scale = math.hypot(self.weights_ms, tokens * self.token_us / 1000)
        return there * scale / math.hypot(h100.weights_ms, tokens * h100.token_us / 1000)

    @cached_property
    def many_tokens(self) -> float:
        """From so many on GEMMs compute for longer than they read."""
        return 256 * (self.weights_ms / self.token_us) / (H100.weights_ms / H100.token_us)

    def parts_of(self, load: StepLoad) -> StepParts:
        """A step, far from the limit of the device's power."""
        tokens = load.rows + load.prompt_tokens
        gemms = self.gemms_ms(tokens)
        pairs = load.pairs * self.pair_operations / self.operations_per_ms
        reading = self.fixed_ms + self.small_ms * tokens + self.mixed_ms * (load.prompt_tokens > 0)
        reading += load.kv_tokens * self.kv_bytes / self.bytes_per_ms
        if tokens > self.many_tokens:
            return StepParts(gemms + pairs, reading)
        return StepParts(pairs, gemms + reading)

    def step_ms(self, load: StepLoad) -> float:
        return sum(self.parts_of(load))

    def config(self, longest: int, target_ms: float = 0.0) -> ResolvedConfig:
        """What a start of it resolves to, for requests of at most so many tokens."""
        return structs.replace(
            fake_config(SEQS, longest),
            device="cuda", prefix_cache=False, itl_target_ms=target_ms,
            num_pages=self.kv_tokens // PAGE_SIZE,
            full_wave_sizes=full_wave_sizes(self.widths, self.processors, MAX_TOKENS),
            **({} if self.encoder is None else ENCODER_FIELDS),
        )  # fmt: skip


H100 = DeviceModel(
    "h100", 4.7, 18.2, 147_456, 2.7e9, 589_824, 5.5e11, 0.35, 0.0011, 0.3, 0.26, 386_272
)
H200 = DeviceModel(
    "h200", 3.8, 18.0, 147_456, 4.0e9, 589_824, 5.5e11, 0.35, 0.0011, 1.2, 0.3, 720_000
)
# Qwen3-VL-8B, measured: an image of 1024 x 1024 takes 18.9 ms, and one of 448 x 448, which the
# host's launches limit, 10.9 ms.
H200_VL = replace(H200, name="h200-vl", encoder=EncoderTimes(307.0, 10.9 / 28))
# Qwen3-8B on both, measured; the others are scaled by what is published of the devices.
DEVICES = {
    device.name: device
    for device in (
        H100,
        H200,
        DeviceModel(
            "l40s", 19.0, 84.0, 147_456, 0.8e9, 589_824, 1.5e11, 0.35, 0.0011, 0.3, 0.1, 170_000,
            processors=142,
        ),
        DeviceModel(
            "b200", 2.2, 8.4, 147_456, 7.0e9, 589_824, 1.2e12, 0.35, 0.0011, 0.3, 0.2, 900_000,
            processors=148,
        ),
        DeviceModel(
            "h200-0.6b", 0.28, 2.6, 114_688, 4.0e9, 229_376, 4.5e11, 0.4, 0.0008, 0.2, 0.15,
            1_000_000, widths=(6144, 1024),
        ),
        DeviceModel(
            "2xh100-70b", 15.6, 125.0, 163_840, 4.1e9, 1_310_720, 5.5e11, 2.0, 0.02, 0.6, 0.26,
            640_000, widths=(28_672, 8192),
        ),
    )
}  # fmt: skip


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

    def __init__(
        self, clock: SimulatedClock, seed: int, stalls: float = 0.0, model: DeviceModel = H100
    ) -> None:
        self.graph_counts = GraphCounts()  # it has no graphs
        self._clock = clock
        self._rng = random.Random(seed)
        self._stalls = stalls
        self._model = model
        self._free_at = self._began = 0.0
        self._computed = UNHINDERED_SHARE  # part of the time, lately
        self.step_seconds: list[tuple[StepLoad, float]] = []
        self._image_tokens = 0  # of the image that is being encoded

    def forward(self, batch: Batch) -> None:
        load = load_of(batch)
        total = self._step_ms(load, self._encoder_ms(batch))
        began = max(self._clock.now, self._free_at)
        seconds = total / 1000 * self._rng.uniform(0.97, 1.03)
        if self._rng.random() < self._stalls:
            seconds *= 5
        self._free_at = began + seconds
        self._began = began
        self.step_seconds.append((load, seconds))

    def _encoder_ms(self, batch: Batch) -> float:
        total, encoder = 0.0, self._model.encoder
        for stages in batch.image_stages:
            assert encoder is not None
            if stages.image is not None:
                self._image_tokens = stages.image.num_tokens
            total += encoder.ms(self._image_tokens, stages.first, stages.end)
        return total

    def _step_ms(self, load: StepLoad, encoder_ms: float = 0.0) -> float:
        computing, reading = self._model.parts_of(load)
        computing += encoder_ms
        computing *= 1 + self._model.slowdown * max(0.0, self._computed - UNHINDERED_SHARE)
        total = computing + reading
        share = 1 - math.exp(-total / LATELY_MS)
        self._computed += share * (computing / total - self._computed)
        return total

    def prepare(self) -> bool:
        return False

    def sample(self, batch: Batch, masks: Masks | None = None) -> SimulatedResult:
        tokens = np.where(batch.sample, 1, -1).astype(np.int32)[:, None]
        sampled = ModelRunnerOutput(tokens, seconds=self._free_at - self._began)
        return SimulatedResult(self._clock, self._free_at, sampled)
