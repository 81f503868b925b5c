"""The time of a step is that between its two events, whatever is queued meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.executor.pending import MAX_IN_FLIGHT, StepClock


@dataclass
class Stream:
    """A device that reaches the events in their order, each at a time that the test sets."""

    now: float = 0.0


@dataclass
class Event:
    stream: Stream
    at: list[float] = field(default_factory=list)
    waited: int = 0

    def record(self) -> None:
        self.at.append(self.stream.now)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other: Event, /) -> float:
        return other.at[-1] - self.at[-1]


def test_steps_in_flight_have_times_of_their_own() -> None:
    stream = Stream()
    pairs = [(Event(stream), Event(stream)) for _ in range(MAX_IN_FLIGHT)]
    clock = StepClock(list(pairs))
    spans = []
    for number in range(3 * MAX_IN_FLIGHT):
        stream.now += 1.0  # no step
        clock.begin()
        stream.now += 10.0 + number
        spans.append((clock.end(), number))
        if len(spans) == MAX_IN_FLIGHT:
            span, first = spans.pop(0)
            assert span is not None and span.seconds() == (10.0 + first) / 1000
    assert all(ended.waited for _, ended in pairs)


def test_a_cpu_is_not_timed() -> None:
    clock = StepClock.of(torch.device("cpu"))
    clock.begin()
    assert clock.end() is None
