"""Gaps of plain streams beside callers with images, and with as much text, simulated.

    python -m benchmarks.schedule.bench_beside_images [--callers 32] [--target 15]

The scheduler is the real one, on a simulated H200 with Qwen3-VL-8B (device_model.py): 32 plain
streams of 128 tokens and 256 of answer, beside callers whose prompts have 1048 tokens and their
answers 64.  In one run 1024 of each prompt are of an image that is like no other.  This is what
`python -m benchmarks.images.bench_images --only beside` measures on a GPU, without the server.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from benchmarks.schedule.device_model import H200_VL, SimulatedClock, SimulatedDevice
from benchmarks.schedule.simulation import (
    LONGEST,
    VOCAB_SIZE,
    WARM_UP,
    TrafficRunner,
    percentile_ms,
)
from benchmarks.schedule.traffic import RequestSize, Traffic, fixed
from runtime.engine.loop import Engine

PLAIN = RequestSize(128, 256)
TEXT, IMAGE = RequestSize(1048, 64), RequestSize(1048, 64, image=1024)


@dataclass
class Seen:
    """What clients see, in seconds."""

    gaps: list[float] = field(default_factory=list[float])  # of plain streams
    first: list[float] = field(default_factory=list[float])  # tokens of callers
    answers: int = 0  # of callers

    def line(self) -> str:
        gaps = [percentile_ms(self.gaps, share) for share in (0.5, 0.99, 1.0)]
        return (
            f"plain streams' ITL p50 {gaps[0]:.1f}, p99 {gaps[1]:.1f}, worst {gaps[2]:.1f} ms; "
            f"callers' TTFT p50 {percentile_ms(self.first, 0.5):.0f}, "
            f"p99 {percentile_ms(self.first, 0.99):.0f} ms, {self.answers} answers"
        )


class MixedRunner(TrafficRunner):
    """Plain streams and callers, each in a closed loop."""

    def __init__(
        self, engine: Engine, clock: SimulatedClock, callers: int, size: RequestSize
    ) -> None:
        super().__init__(engine, clock, Traffic(fixed(1, 1)))
        self._callers, self._size, self.seen = callers, size, Seen()

    def run_for(self, seconds: float) -> Seen:
        """The second half of so many seconds."""
        clock = self._clock
        half, end = clock.now + seconds / 2, clock.now + seconds
        for client in range(2 * self._callers):
            self._send_next(client)
        while clock.now < end:
            if clock.now < half:
                self.seen = Seen()
            self._step()
        return self.seen

    def _send_next(self, client: int) -> None:
        size = PLAIN if client < self._callers else self._size
        self._send(client, size, self._clock.now)

    def _token(self, id: int, before: float | None) -> None:
        now, plain = self._clock.now, self._clients[id] < self._callers
        if before is not None:
            if plain:
                self.seen.gaps.append(now - before)
        elif not plain:
            self.seen.first.append(now - self._sent[id])

    def _finish(self, id: int) -> None:
        client = self._clients[id]
        super()._finish(id)
        self.seen.answers += client >= self._callers
        self._send_next(client)


def simulate(size: RequestSize, *, callers: int, seconds: float, target_ms: float = 0.0) -> Seen:
    """Plain streams beside as many callers with prompts of `size`."""
    clock = SimulatedClock()
    device = SimulatedDevice(clock, 1, model=H200_VL)
    engine = Engine(H200_VL.config(LONGEST, target_ms), VOCAB_SIZE, device, clock=clock)
    TrafficRunner(engine, clock, WARM_UP).run()
    return MixedRunner(engine, clock, callers, size).run_for(seconds)


def alone_ms(size: RequestSize) -> float:
    """Time to first token of a prompt with no other beside it."""
    clock = SimulatedClock()
    engine = Engine(
        H200_VL.config(LONGEST), VOCAB_SIZE, SimulatedDevice(clock, 1, model=H200_VL), clock=clock
    )
    traffic = Traffic(lambda: size, clients=1, requests=4)
    return percentile_ms(TrafficRunner(engine, clock, traffic).run().first, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--target", type=float, default=0.0, help="ms; 0: automatic")
    arguments = parser.parse_args()
    worst: list[float] = []
    for title, size in (("text", TEXT), ("image", IMAGE)):
        seen = simulate(
            size, callers=arguments.callers, seconds=arguments.seconds, target_ms=arguments.target
        )
        print(f"beside {arguments.callers} callers with {title}: {seen.line()}", flush=True)
        worst.append(percentile_ms(seen.gaps, 0.99))
    print(f"ITL p99 beside images is {worst[1] / worst[0]:.2f} times that beside text")
    print(f"TTFT alone: text {alone_ms(TEXT):.1f} ms, image {alone_ms(IMAGE):.1f} ms")


if __name__ == "__main__":
    main()
