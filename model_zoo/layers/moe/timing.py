"""ExpertsTimer: times the experts' kernels on a GPU as in a step: in a CUDA graph, after a norm."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.layers.gemm.timing import replayed_us, side_stream
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import Tiles

CALLS, REPLAYS = 6, 4
MANY, MANY_CALLS = 256, 3  # tokens from which fewer calls suffice
TOO_SLOW = float("inf")
LARGEST_ERROR = 1 / 16  # of an output's norm; roundings of inner values change it by 1 / 100
log = logging.getLogger(__name__)


class ExpertsTimer:
    """Times experts of several layers in turn, each call with a routing of its own.

    Routing is random, so that experts get about as many tokens each.  What a shared expert has
    computed is there, if the layers have one, since other kernels add it.
    """

    def __init__(self, layers: Sequence[Experts], tokens: int) -> None:
        self._layers = layers
        self._calls = MANY_CALLS if tokens >= MANY else CALLS
        experts = layers[0]
        dtype, device = experts.gate_up.dtype, experts.gate_up.weight.device
        self._source = torch.randn(tokens, experts.hidden, dtype=dtype, device=device)
        self._x = torch.zeros_like(self._source)
        self._ones = torch.ones(experts.hidden, dtype=dtype, device=device)
        self._shared = torch.randn_like(self._source) if experts.has_shared else None
        self._shared_gate: Tensor | None = None
        if experts.has_shared_gate:
            self._shared_gate = torch.randn(tokens, dtype=experts.gate_dtype, device=device)
        self._routings = [random_routing(experts, tokens, device) for _ in range(self._calls)]

    def run(self, call: int, tiles: Tiles) -> Tensor:
        ids, weights = self._routings[call]
        experts = self._layers[call % len(self._layers)]
        shared = self._shared, self._shared_gate
        return run_experts(experts, self._x, ids, weights, *shared, tiles=tiles)

    def microseconds(self, candidates: Sequence[Tiles]) -> list[float]:
        """Median time of a layer with each candidate; infinite for one that the device is too
        small for, or whose output is not that of the first."""
        from triton.runtime.errors import OutOfResources

        device = self._x.device
        stream = side_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        expected: Tensor | None = None
        with torch.cuda.stream(stream):
            self._x.copy_(self._source)
            for place, tiles in enumerate(candidates):
                try:
                    output = self.run(0, tiles).float()  # compiles
                except OutOfResources:
                    continue
                expected = output if expected is None else expected
                if is_right(output, expected, tiles):
                    graphs[place] = self._captured(tiles)
            found = replayed_us(list(graphs.values()), self._calls, REPLAYS)
        times = dict(zip(graphs, found, strict=True))
        return [times.get(place, TOO_SLOW) for place in range(len(candidates))]

    def _captured(self, tiles: Tiles) -> torch.cuda.CUDAGraph:
        from model_zoo.layers.kernels.add_rms_norm import add_rms_norm

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in range(self._calls):
            add_rms_norm(self._x, self._source, self._ones, 1e-6)
            self.run(call, tiles)
        graph.capture_end()
        return graph


def is_right(output: Tensor, expected: Tensor, tiles: Tiles) -> bool:
    """Whether the output is that of the first tiles; a warning if it is not."""
    off = float((output - expected).norm() / expected.norm().clamp(min=1e-30))
    if off <= LARGEST_ERROR:
        return True
    log.warning(
        "%s is not used: its output differs from that of the first tiles by %.0f %%",
        tiles, 100 * off,
    )  # fmt: skip
    return False


def random_routing(experts: Experts, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """-> (ids [T, k] int32, different ones in a row but for those that are not here; weights
    [T, k] float32).

    At least one is here: of a product that is 0, every candidate would be right.
    """
    scores = torch.rand(tokens, experts.all_experts, device=device)
    ids = scores.topk(experts.top_k).indices.int().clamp_max(experts.num_experts)
    here = (ids[0] < experts.num_experts).any()  # stays on the device
    ids[0, 0] = torch.where(here, ids[0, 0], 0)
    return ids, torch.full(ids.shape, 1 / experts.top_k, device=device)


def times(layers: Sequence[Experts], candidates: Sequence[Tiles], tokens: int) -> list[float]:
    """Microseconds of each candidate for so many tokens, over the experts of all layers."""
    if len(candidates) == 1:
        return [0.0]
    return ExpertsTimer(layers, tokens).microseconds(candidates)
