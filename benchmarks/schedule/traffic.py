"""The loads of bench_schedule: who sends which requests, and when."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class RequestSize(NamedTuple):
    """Tokens of a request."""

    prompt: int  # to compute
    answer: int
    cached: int = 0  # before the prompt, and computed already
    image: int = 0  # of the prompt, those of an image that is like no other


class Arrival(NamedTuple):
    at: float  # seconds
    size: RequestSize


Sizes = Callable[[], RequestSize]


def fixed(prompt: int, answer: int, cached: int = 0) -> Sizes:
    return lambda: RequestSize(prompt, answer, cached)


def chat(seed: int) -> Sizes:
    """Log-normal lengths: medians 400 and 200 tokens."""
    rng = random.Random(seed)

    def draw() -> RequestSize:
        prompt = int(rng.lognormvariate(math.log(400), 1.0))
        answer = int(rng.lognormvariate(math.log(200), 0.8))
        return RequestSize(min(max(prompt, 16), 8000), min(max(answer, 8), 2000))

    return draw


def poisson(rate: float, count: int, draw: Sizes, seed: int = 3) -> list[Arrival]:
    """`count` arrivals of `rate` a second."""
    rng, at, arrivals = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, draw()))
    return arrivals


@dataclass
class Traffic:
    """Requests of a closed loop of clients, or a list of arrivals."""

    draw: Sizes
    clients: int = 0
    requests: int = 0  # of all clients together
    arrivals: Iterable[Arrival] = field(default_factory=list[Arrival])
    unmeasured: int = 0  # answers at the beginning

    @property
    def total(self) -> int:
        return self.requests if self.clients else len(list(self.arrivals))


class LoadSpec(NamedTuple):
    """A load by its name.  `share` of the capacity arrives, or `clients` form a closed loop."""

    name: str
    sizes: Callable[[int], Sizes]  # of a seed
    clients: int = 0
    rounds: int = 0  # requests of each client
    share: float = 0.0
    count: int = 0  # arrivals
    burst: int = 0  # arrivals at once


def closed(clients: int, prompt: int, answer: int, rounds: int, cached: int = 0) -> LoadSpec:
    name = f"c{clients} {prompt}/{answer}" + (f" after {cached}" if cached else "")
    return LoadSpec(name, lambda seed: fixed(prompt, answer, cached), clients, rounds)


LOADS = (
    closed(1, 1024, 256, 8), closed(8, 1024, 256, 12), closed(32, 1024, 256, 8),
    closed(128, 1024, 256, 7), closed(256, 1024, 256, 6), closed(512, 1024, 256, 5),
    closed(32, 4096, 8, 8), closed(8, 16384, 128, 8), closed(20, 300, 200, 10, cached=30_000),
    *(LoadSpec(f"chat at {share:.0%}", chat, share=share, count=1500)
      for share in (0.5, 0.8, 0.95, 1.1)),
    LoadSpec("rag 8192/200 at 70%", lambda seed: fixed(8192, 200), share=0.7, count=300),
    LoadSpec("bursts of 64", lambda seed: fixed(1024, 256), share=0.6, count=640, burst=64),
)  # fmt: skip


def traffic_of(spec: LoadSpec, per_second: float, *, whole: bool = False) -> Traffic:
    """The requests of a load where the device answers `per_second` of them at most."""
    if spec.clients:
        skipped = 0 if whole else 2 * spec.clients
        requests = spec.clients * spec.rounds
        return Traffic(spec.sizes(7), spec.clients, requests, unmeasured=skipped)
    draw, rate = spec.sizes(7), spec.share * per_second
    if spec.burst:
        sent = [index // spec.burst * spec.burst / rate for index in range(spec.count)]
        arrivals = [Arrival(at, draw()) for at in sent]
    else:
        arrivals = poisson(rate, spec.count, draw)
    skipped = 0 if whole else spec.count // 8
    return Traffic(draw, arrivals=arrivals, unmeasured=skipped)
