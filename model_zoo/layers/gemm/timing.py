"""GemmTimer: times GEMMs on a GPU as in a step: in a CUDA graph, each after a small kernel."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import MAX_ROWS, GemmImpl, Weight
from model_zoo.layers.linear import Linear

COLD_BYTES = 150 << 20  # of weights per replay, so that none is in the L2 cache in the next
MIN_CALLS, REPLAYS = 6, 5
# Of many rows, which take longer and vary less.
MIN_LONG_CALLS, LONG_REPLAYS = 3, 3


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all timers: cuBLAS keeps a workspace of 32 MiB per stream."""
    return torch.cuda.Stream(device)


class GemmTimer:
    """Times GEMMs of x [rows, K] with `weights` [N, K] in turn; owns the captured graphs."""

    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, rows: int, dtype: torch.dtype
    ) -> None:
        """dtype: of x"""
        self._weights, self._bias = weights, bias
        long = rows > MAX_ROWS
        self._least = MIN_LONG_CALLS if long else MIN_CALLS
        self._replays = LONG_REPLAYS if long else REPLAYS
        weight = weights[0]
        self._source = torch.randn(rows, weight.shape[1], dtype=dtype, device=weight.device)
        self._x = torch.zeros_like(self._source)
        self._ones = torch.ones(weight.shape[1], dtype=dtype, device=weight.device)
        self._stream = side_stream(weight.device)

    def microseconds(self, gemms: Sequence[GemmImpl]) -> list[float]:
        """Median time of a call of each GEMM, interleaved so that disturbances affect all."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graphs = [self._captured(gemm) for gemm in gemms]
            return replayed_us(graphs, self._calls(), self._replays)

    def _calls(self) -> int:
        return max(self._least, -(-COLD_BYTES // self._weights[0].nbytes))

    def _captured(self, gemm: GemmImpl) -> torch.cuda.CUDAGraph:
        from model_zoo.layers.kernels.add_rms_norm import add_rms_norm

        gemm.run(self._x, self._weights[0], self._bias)  # compiles
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in range(self._calls()):
            add_rms_norm(self._x, self._source, self._ones, 1e-6)
            gemm.run(self._x, self._weights[call % len(self._weights)], self._bias)
        graph.capture_end()
        return graph


def replayed_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, replays: int) -> list[float]:
    """Median microseconds of each graph's call, interleaved; waits for the current stream."""
    events = [[(graph, *_replayed(graph)) for graph in graphs] for _ in range(replays + 1)]
    torch.cuda.current_stream().synchronize()
    return [
        statistics.median(turn[place][1].elapsed_time(turn[place][2]) for turn in events[1:])
        * (1000 / calls)
        for place in range(len(graphs))
    ]


def _replayed(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    return start, end


def times(layers: Sequence[Linear], gemms: Sequence[GemmImpl], rows: int) -> list[float]:
    """Microseconds of each GEMM for `rows` rows, over the weights of all layers."""
    if len(gemms) == 1:
        return [0.0]
    weights = [layer.operand for layer in layers]
    return GemmTimer(weights, layers[0].bias, rows, layers[0].dtype).microseconds(gemms)
