"""Times of work that several GPUs do at the same time, each in a CUDA graph of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.attention.timing import GRAPH_US, MIN_CALLS, elapsed_us

Call = Callable[[int], object]  # the number of a set of operands


@dataclass(frozen=True, slots=True)
class Graphs:
    """A graph a GPU, each of so many calls, and what they must not outlive."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    calls: int
    of: Sequence[Call]


class TogetherTimer:
    """Graphs of all devices are replayed at the same time: none starts before each has ended the
    one before, and the host has queued both by then."""

    def __init__(self, devices: Sequence[torch.device], replays: int) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._replays = replays

    def capture(self, calls: Sequence[Call], num_sets: int) -> Graphs:
        """Record call(set) of each device, over its sets in turn."""
        for device in {stream.device for stream in self._streams}:
            torch.cuda.synchronize(device)
        number = max(
            self._enough(stream, call, num_sets)
            for stream, call in zip(self._streams, calls, strict=True)
        )
        graphs = [
            _captured(stream, call, number, num_sets)
            for stream, call in zip(self._streams, calls, strict=True)
        ]
        return Graphs(graphs, number, calls)

    def _enough(self, stream: torch.cuda.Stream, call: Call, num_sets: int) -> int:
        """Compile what has to be, and find out how many calls are enough."""
        with torch.cuda.stream(stream):
            call(0)
            enough = min(MIN_CALLS, 1 + int(GRAPH_US / elapsed_us(lambda: call(num_sets - 1))))
        return num_sets * -(-enough // num_sets)

    def replay(self, captured: Sequence[Graphs]) -> list[float]:
        """Median microseconds of a call on the slower device, replayed in turns."""
        turns = [[self._replayed(each) for each in captured] for _ in range(self._replays + 1)]
        for stream in self._streams:
            stream.synchronize()
        return [
            statistics.median(_slower_ms(turn[place]) for turn in turns[1:]) * 1000 / each.calls
            for place, each in enumerate(captured)
        ]

    def _replayed(self, captured: Graphs) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Queue a replay on each device, between two events of that device."""
        self._meet()
        events = []
        for stream, graph in zip(self._streams, captured.graphs, strict=True):
            with torch.cuda.stream(stream):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events.append((start, end))
        return events

    def _meet(self) -> None:
        """Let no stream go on before all are here."""
        here = [stream.record_event() for stream in self._streams]
        for stream in self._streams:
            for event in here:
                stream.wait_event(event)


def _captured(
    stream: torch.cuda.Stream, call: Call, number: int, num_sets: int
) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()  # torch.cuda.graph() would empty the caches each time
        graph.capture_begin()
        for i in range(number):
            call(i % num_sets)
        graph.capture_end()
    return graph


def _slower_ms(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return max(start.elapsed_time(end) for start, end in events)
