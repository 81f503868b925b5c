"""The time of a step is its own, whatever is queued meanwhile."""

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
    is_over: bool = False

    def record(self) -> None:
        self.at.append(self.stream.now)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other: Event, /) -> float:
        return other.at[-1] - self.at[-1]


class Events:
    """Those of a clock, in the order in which it makes them."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.stream, self.made, self.is_over = Stream(), list[Event](), is_over

    def new(self) -> Event:
        self.made.append(Event(self.stream, is_over=self.is_over))
        return self.made[-1]

    @property
    def recorded(self) -> int:
        return sum(len(event.at) for event in self.made)


def test_steps_in_flight_have_times_of_their_own() -> None:
    """Each begins where the one before ends, since that is not over when it is queued."""
    events = Events()
    clock = StepClock(events.new)
    spans = []
    for number in range(3 * MAX_IN_FLIGHT):
        clock.begin()
        events.stream.now += 10.0 + number
        spans.append((clock.end(), number))
        if len(spans) == MAX_IN_FLIGHT - 1:
            span, first = spans.pop(0)
            assert span is not None and span.seconds() == (10.0 + first) / 1000
    assert events.recorded == 3 * MAX_IN_FLIGHT + 1, "one a step, and the first one's begin"
    assert sum(event.waited for event in events.made)


def test_the_time_between_two_steps_is_none_of_a_step() -> None:
    events = Events(is_over=True)
    clock = StepClock(events.new)
    spans = []
    for number in range(2 * MAX_IN_FLIGHT):
        events.stream.now += 1.0  # no step
        clock.begin()
        events.stream.now += 10.0 + number
        spans.append((clock.end(), number))
        if len(spans) == MAX_IN_FLIGHT:
            span, first = spans.pop(0)
            assert span is not None and span.seconds() == (10.0 + first) / 1000


def test_an_event_after_the_step_that_is_there_already_is_not_recorded_again() -> None:
    events = Events()
    clock = StepClock(events.new)
    ended = Event(events.stream)
    for _ in range(2):
        clock.begin()
        events.stream.now += 10.0
        ended = Event(events.stream)
        ended.record()
        span = clock.end(ended)
        assert span is not None and span.seconds() == 10.0 / 1000
    assert events.recorded == 1


def test_work_that_is_queued_later_belongs_to_its_step() -> None:
    """As the sampling of rows whose masks the host computes meanwhile."""
    events = Events()
    clock = StepClock(events.new)
    ended = Event(events.stream)
    clock.begin()
    events.stream.now += 10.0
    ended.record()
    clock.end(ended)
    events.stream.now += 5.0
    span = clock.end()
    assert span is not None and span.seconds() == 15.0 / 1000


def test_a_cpu_is_not_timed() -> None:
    clock = StepClock.of(torch.device("cpu"))
    clock.begin()
    assert clock.end() is None
