"""Up to how many rows norms compute the sums over ranks: measured at start, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.self_check import EPS, AllReduce
from model_zoo.layers.all_reduce.symmetric_buffers import TURNS, SymmetricBuffers
from model_zoo.layers.gemm.timing import replayed_us, side_stream

CALLS, REPLAYS = 16, 7  # of a graph, and of a measurement: an even number of calls
DENSE_FROM = 128  # sizes double from here on; below that both take about as long for one as for all

# Microseconds of a call with so many rows, of the slowest rank, the same on all.
Time = Callable[[int], float]


def sizes(most: int) -> Iterator[int]:
    """The numbers of rows to measure, ascending."""
    yield from (rows for rows in (1, 8, 32) if rows < most)
    rows = DENSE_FROM
    while rows < most:
        yield rows
        rows *= 2
    yield most


def fastest_rows(rows: Iterable[int], fused: Time, library: Time) -> int:
    """The largest number of rows with which, and with all smaller ones, the fused kernel is the
    faster; 0: with none."""
    chosen = 0
    for count in rows:
        if fused(count) >= library(count):
            break
        chosen = count
    return chosen


def fused_us(buffers: SymmetricBuffers, rows: int, *, plus_one: bool) -> float:
    """Microseconds of all_reduce_add_rms_norm on this rank, as the layers of a step run it."""
    part, residual, weight = _operands(buffers, rows)

    def call(index: int) -> None:
        turn = index % TURNS
        all_reduce_add_rms_norm(buffers, turn, part, residual, weight, EPS, plus_one=plus_one)

    return _graphed_us(call, buffers.memory.device)


def library_us(
    buffers: SymmetricBuffers, all_reduce: AllReduce, rows: int, *, plus_one: bool
) -> float:
    """The same of the library's sum, and add_rms_norm."""
    from model_zoo.layers.kernels.add_rms_norm import add_rms_norm

    part, residual, weight = _operands(buffers, rows)

    def call(index: int) -> None:
        add_rms_norm(all_reduce(part), residual, weight, EPS, plus_one=plus_one)

    return _graphed_us(call, buffers.memory.device)


def _operands(buffers: SymmetricBuffers, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """A part [rows, size], a residual and a weight [size]."""
    new = {"dtype": buffers.dtype, "device": buffers.memory.device}
    part, residual = (torch.randn(rows, buffers.size, **new) for _ in range(2))
    return part, residual, torch.ones(buffers.size, **new)


def _graphed_us(call: Callable[[int], None], device: torch.device) -> float:
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(TURNS):
            call(index)  # compiled, and the library's channels made
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for index in range(CALLS):
            call(index)
        graph.capture_end()
        return replayed_us([graph], CALLS, REPLAYS)[0]
