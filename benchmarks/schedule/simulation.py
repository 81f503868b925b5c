"""One load on one simulated device: latencies and throughput, with the real scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from typing import NamedTuple

from msgspec import structs

from benchmarks.schedule.device_model import ENCODER, DeviceModel, SimulatedClock, SimulatedDevice
from benchmarks.schedule.policies import POLICIES
from benchmarks.schedule.traffic import Arrival, LoadSpec, RequestSize, Traffic, fixed, traffic_of
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PromptImage, SamplingParams

VOCAB_SIZE = 1000
LONGEST = 40_000  # tokens of a request
WARM_UP = Traffic(fixed(1024, 256), clients=8, requests=8)
CAPACITY_CLIENTS, CAPACITY_ROUNDS = 192, 5
SHARES = 0.5, 0.99
TEXT_BEFORE = 8  # tokens of text before an image


class Percentiles(NamedTuple):
    """What a client sees; times in milliseconds."""

    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    largest_chunk: int
    requests_per_second: float


@dataclass
class LatencyStats:
    output_tokens: int = 0
    answers: int = 0
    first: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    began: float = 0.0

    def percentiles(self, now: float, largest_chunk: int) -> Percentiles:
        seconds = now - self.began
        return Percentiles(
            self.output_tokens / seconds,
            *(percentile_ms(each, share) for each in (self.first, self.gaps) for share in SHARES),
            largest_chunk,
            self.answers / seconds,
        )  # fmt: skip


def percentile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class TrafficRunner:
    """Sends the requests of a load to an engine and takes its answers."""

    def __init__(self, engine: Engine, clock: SimulatedClock, traffic: Traffic) -> None:
        self._engine = engine
        self._clock = clock
        self._traffic = traffic
        self._arrivals = deque(traffic.arrivals)
        self._total = traffic.total
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._clients: dict[int, int] = {}
        self._num_sent = 0
        self._num_answered = 0
        self.stats = LatencyStats(began=clock.now)
        self._start = clock.now

    def run(self) -> LatencyStats:
        """From the first request to the last answer."""
        for client in range(self._traffic.clients):
            self._send(client, self._traffic.draw(), self._clock.now)
        while self._num_answered < self._total:
            while self._arrivals and self._start + self._arrivals[0].at <= self._clock.now:
                self._arrive(self._arrivals.popleft())
            if self._engine.idle:
                self._clock.now = self._start + self._arrivals[0].at
                continue
            self._step()
        return self.stats

    def _arrive(self, arrival: Arrival) -> None:
        self._send(self._num_sent, arrival.size, self._start + arrival.at)

    def _send(self, client: int, size: RequestSize, at: float) -> None:
        id = self._num_sent
        self._num_sent += 1
        tokens = [client % VOCAB_SIZE] * size.cached + [id % VOCAB_SIZE] * size.prompt
        self._sent[id] = at
        self._clients[id] = client
        params = SamplingParams(max_tokens=size.answer)
        images = (square_image(size.image, id),) if size.image else ()
        self._engine.add(EngineRequest(id, 0, tokens, params, images=images))

    def _step(self) -> None:
        ended: list[int] = []
        for output in self._engine.step():
            self.stats.output_tokens += len(output.tokens)
            self._token(output.id, self._last.get(output.id))
            self._last[output.id] = self._clock.now
            if output.finish is not None:
                assert output.finish == "length", output
                ended.append(output.id)
        for id in ended:
            self._finish(id)

    def _token(self, id: int, before: float | None) -> None:
        """A request has a token now, and had one `before`."""
        if before is None:
            self.stats.first.append(self._clock.now - self._sent[id])
        else:
            self.stats.gaps.append(self._clock.now - before)

    def _finish(self, id: int) -> None:
        del self._last[id], self._sent[id]
        self._num_answered += 1
        self.stats.answers += 1
        if self._num_answered == self._traffic.unmeasured:
            self.stats = LatencyStats(began=self._clock.now)
        client = self._clients.pop(id)
        more = self._traffic.clients and (
            self._traffic.unmeasured or self._num_sent < self._traffic.requests
        )
        if more:
            self._send(client, self._traffic.draw(), self._clock.now)


@cache
def _pixels(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def square_image(num_tokens: int, number: int) -> PromptImage:
    """An image behind the first tokens of a prompt.  Its pixels stand for others each time."""
    side = ENCODER.token_side * isqrt(num_tokens)
    pixels, digest = _pixels(3 * side * side), number.to_bytes(32, "little")
    return PromptImage(TEXT_BEFORE, num_tokens, side, side, pixels, digest)


def simulate(
    model: DeviceModel,
    traffic: Traffic,
    *,
    policy: str = "wavefill",
    target_ms: float = 0.0,
    cached: bool = False,
) -> Percentiles:
    """`traffic` on a warmed-up engine of `model`; `cached` if its requests share prefixes."""
    clock = SimulatedClock()
    device = SimulatedDevice(clock, 1, model=model)
    config = structs.replace(model.config(LONGEST, target_ms), prefix_cache=cached)
    engine = Engine(config, VOCAB_SIZE, device, clock=clock)
    engine.scheduler = POLICIES[policy](engine.requests)
    # As `wavefill bench serve` does, so that the engine has run steps with and without prompts.
    TrafficRunner(engine, clock, WARM_UP).run()
    while not engine.idle:
        engine.step()
    counted_from = len(device.step_seconds)
    stats = TrafficRunner(engine, clock, traffic).run()
    mixed = [load for load, _ in device.step_seconds[counted_from:] if load.rows]
    return stats.percentiles(clock.now, max((load.prompt_tokens for load in mixed), default=0))


def capacity(model: DeviceModel, spec: LoadSpec) -> float:
    """Requests of a load's sizes that a device answers in a second, at most."""
    clients = CAPACITY_CLIENTS
    traffic = Traffic(spec.sizes(5), clients, clients * CAPACITY_ROUNDS, unmeasured=2 * clients)
    return simulate(model, traffic, policy="vllm").requests_per_second


def simulate_load(
    model: DeviceModel,
    spec: LoadSpec,
    policy: str = "wavefill",
    per_second: float = 0.0,
    *,
    whole: bool = False,
    target_ms: float = 0.0,
) -> Percentiles:
    """A load on a device that answers `per_second` of its requests at most."""
    traffic = traffic_of(spec, per_second, whole=whole)
    cached = spec.sizes(0)().cached > 0
    return simulate(model, traffic, policy=policy, target_ms=target_ms, cached=cached)
