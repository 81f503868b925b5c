"""Times on a GPU: replays of a CUDA graph, and the bandwidth that a share refers to."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 5  # consecutive replays of one graph
# Calls per graph, or their time, so that the graph's launch is negligible.
MIN_CALLS, GRAPH_US = 20, 1000.0
MAX_US = 100_000.0  # of one subject's replays: fewer than asked for, RUN at least, if they are long


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds a call: the median of the replays, and the range of their middle 80 %."""

    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TimedGraph:
    """A graph of so many calls, and what it must not outlive: the plans and tensors of its call."""

    graph: torch.cuda.CUDAGraph
    calls: int
    call: Callable[[int], object]


class Timer(Protocol):
    def capture(self, call: Callable[[int], object], num_sets: int) -> TimedGraph:
        """Record call(set) over the sets in turn."""
        ...

    def replay(self, captured: Sequence[TimedGraph]) -> list[Sample]:
        """Time them, one after the other and again, so that a warm device is warm for all."""
        ...


def elapsed_us(run: Callable[[], object]) -> float:
    """Microseconds of the device for what `run` queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


class GraphTimer:
    """Graphs of at least MIN_CALLS calls that use every set; each is replayed `replays` times.

    between  follows each call in the graph, and between_us is taken off its time
    """

    def __init__(
        self,
        replays: int,
        between: Callable[[], object] | None = None,
        between_us: float = 0.0,
    ) -> None:
        self._runs = -(-replays // RUN)
        self._between, self._between_us = between, between_us
        self._stream = torch.cuda.Stream()

    def capture(self, call: Callable[[int], object], num_sets: int) -> TimedGraph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            calls = self._calls(call, num_sets)
            graph = torch.cuda.CUDAGraph()  # torch.cuda.graph() would empty the caches each time
            graph.capture_begin()
            try:
                for number in range(calls):
                    call(number % num_sets)
                    if self._between is not None:
                        self._between()
            except Exception:
                with contextlib.suppress(RuntimeError):  # of the capture that was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        return TimedGraph(graph, calls, call)

    def _calls(self, call: Callable[[int], object], num_sets: int) -> int:
        """Compile what has to be, and find out how many calls are enough."""
        call(0)
        enough = min(MIN_CALLS, 1 + int(GRAPH_US / elapsed_us(lambda: call(num_sets - 1))))
        return num_sets * -(-enough // num_sets)

    def replay(self, captured: Sequence[TimedGraph]) -> list[Sample]:
        with torch.cuda.stream(self._stream):
            for one in captured:
                one.graph.replay()
            runs = [self._enough_runs(self._time(one)) for one in captured]
            events = [
                (place, self._time(one))
                for turn in range(self._runs)
                for place, one in enumerate(captured)
                if turn < runs[place]
                for _ in range(RUN)
            ]
            self._stream.synchronize()
        times: list[list[float]] = [[] for _ in captured]
        for place, (start, end) in events:
            us = start.elapsed_time(end) * 1000 / captured[place].calls
            times[place].append(us - self._between_us)
        return [_sample(sorted(found)) for found in times]

    def _time(self, captured: TimedGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue a replay between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.graph.replay()
        end.record()
        return start, end

    def _enough_runs(self, once: tuple[torch.cuda.Event, torch.cuda.Event]) -> int:
        once[1].synchronize()
        return max(1, min(self._runs, int(MAX_US / (RUN * once[0].elapsed_time(once[1]) * 1000))))


def isolated_timer(replays: int) -> GraphTimer:
    """A timer of calls that do not overlap: a kernel without dependent launch separates them, and
    its own time is subtracted."""
    number = torch.zeros(1, device="cuda")
    alone = time_one(GraphTimer(replays), lambda _: number.add_(1))
    return GraphTimer(replays, lambda: number.add_(1), alone)


def _sample(times: list[float]) -> Sample:
    tenth = len(times) // 10
    return Sample(statistics.median(times), times[tenth], times[-1 - tenth])


def time_one(timer: Timer, call: Callable[[int], object]) -> float:
    """Microseconds of a call that has one set."""
    return timer.replay([timer.capture(call, 1)])[0].us


# read_stream: sum what a program reads, so that nothing can be left out.
#   grid   one program for each TILES * BLOCK values
#   bound  memory: 4 bytes a value
@triton.jit
def _read_stream(X, SUMS, BLOCK: tl.constexpr, TILES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    values = X + program * (BLOCK * TILES) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        total += tl.load(values + tile * BLOCK).to(tl.float32)
    tl.store(SUMS + program, tl.sum(total, 0))


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """TB/s of device memory; copy counts bytes read and written."""

    read: float
    copy: float


def measure_bandwidth(data: Tensor, timer: Timer) -> Bandwidth:
    """The best of several plain read kernels, and of a copy, over data (flat, 2 bytes an item)."""
    words = data.view(torch.int32)
    read = 0.0
    for block, tiles in ((2048, 16), (4096, 8), (4096, 16), (8192, 8)):
        programs = words.numel() // (block * tiles)
        sums = torch.empty(programs, device=data.device)

        def call(_: int, block: int = block, tiles: int = tiles, sums: Tensor = sums) -> None:
            _read_stream[(len(sums),)](words, sums, block, tiles)  # pyright: ignore[reportArgumentType]

        read = max(read, programs * block * tiles * 4 / time_one(timer, call) / 1e6)
    half = data.numel() // 2
    old, new = data[:half], data[half : 2 * half]
    copies = [lambda _: new.copy_(old), lambda _: torch.neg(old, out=new)]
    return Bandwidth(read, 2 * old.nbytes / min(time_one(timer, copy) for copy in copies) / 1e6)
