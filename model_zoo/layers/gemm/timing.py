"""GemmTimer: times GEMMs on a GPU as in a step: in a CUDA graph, each after a small kernel.

The small kernel computes x, and quantizes it for a GEMM that takes it so.  Of a gated layer another
one follows, unless the GEMM computes the activation.  All are timed together.  So is a NormingGemm,
although a layer may then run it without that kernel: its lead is larger than what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from attention.common.dependent_launch import can_depend
from attention.common.tma_rows import empty_with_room
from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    Gate,
    GatingGemm,
    GemmImpl,
    Weight,
    is_hopper,
)
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_rows import (
    Producer,
    QuantizedRows,
    QuantizedRowsGemm,
    UnscaledGemm,
    UnscaledRows,
    parts_of,
)

COLD_BYTES = 150 << 20  # of weights per replay, so that none is in the L2 cache in the next
# At least MIN_CALLS, so that a replay takes long beside its two events; fewer if they read so much.
LONG_BYTES = 1 << 30
MIN_CALLS, REPLAYS = 6, 5
# Of attention of few rows and short contexts on an H200.  So timed, the output projection of
# Qwen3-30B-A3B uses 128 SMs in place of 64, and a step takes 2.40 ms in place of 2.51.  Between
# dense layers, whose next GEMM loads weights on idle SMs, 64 are better: 2.62 ms and not 2.71.
HELD_NS = 4000
SMALL_BYTES, SMALL_CALLS = 1 << 20, 24  # of weights that take no longer than their launch
# Of many rows, which take longer and vary less.
MIN_LONG_CALLS, LONG_REPLAYS = 3, 3


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all timers: cuBLAS keeps a workspace of 32 MiB per stream."""
    return torch.cuda.Stream(device)


class SmallKernel:
    """What computes x [rows, inputs] of a GEMM, from random numbers: a norm, or silu_mul."""

    def __init__(
        self,
        after: Producer | None,
        rows: int,
        inputs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        held: bool = False,
        leaves_scales: bool = False,
    ) -> None:
        """after: of the Linear; None: a norm, which does not quantize x, or where it is `held`
        nothing but time

        held: x is there, but the kernel takes HELD_NS, as attention's: the GEMM that it launches
              loads weights meanwhile, the more of them the more programs it has
        leaves_scales: of more than MAX_ROWS rows the output is read, too, as in a step by a norm or
              an activation that quantizes, which takes longer if scales are left to it
        """
        few = rows <= MAX_ROWS
        self._held = held and few and can_depend(device)
        self._reads = leaves_scales and not few
        self._read: dict[int, tuple[Tensor, Tensor]] = {}  # by columns: a residual, and a weight
        self._after, self._rows = after, rows
        columns = 2 * inputs if after == "silu_mul" else inputs
        self._source = torch.randn(rows, columns, dtype=dtype, device=device)
        self._x = empty_with_room((rows, inputs), dtype, device).normal_()
        self._ones = torch.ones(inputs, dtype=dtype, device=device)

    def run_with(
        self, gemm: GemmImpl, weight: Weight, bias: Tensor | None, gate: Gate | None = None
    ) -> Tensor | QuantizedRows:
        """The kernel, then the GEMM of what it has computed, and the gated activation of that."""
        x: Tensor | QuantizedRows
        if isinstance(gemm, QuantizedRowsGemm) and self._writes_codes(gemm):
            x = self._quantized(gemm)
        else:
            x = self._plain()
        if gate is not None and isinstance(gemm, GatingGemm) and gemm.gates(self._rows, weight):
            gated = gemm.multiply(x, weight, bias, gate)
            return self._quantized_by_itself(gated) if self._reads else gated
        product: Tensor | UnscaledRows
        if self._reads and isinstance(gemm, UnscaledGemm):
            product = gemm.unscaled(x, weight)
        elif isinstance(gemm, QuantizedRowsGemm) and isinstance(x, QuantizedRows):
            product = gemm.product(x, weight, bias)
        else:
            product = gemm.run(x, weight, bias)
        if self._reads:
            return self._quantized_output(product, gate)
        if gate is None:
            return product
        from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul

        return gelu_tanh_mul(product) if gate == "gelu" else silu_mul(product)

    def _quantized_output(self, y: Tensor | UnscaledRows, gate: Gate | None) -> QuantizedRows:
        from model_zoo.layers.quantized_gemm.quantize_rows import (
            add_rms_norm_quantize,
            silu_mul_quantize,
        )

        if gate is not None:
            return silu_mul_quantize(y, "row", gelu=gate == "gelu")
        values, _, _ = parts_of(y)
        if values.shape[1] not in self._read:
            self._read[values.shape[1]] = torch.zeros_like(values), torch.ones_like(values[0])
        return add_rms_norm_quantize(y, *self._read[values.shape[1]], 1e-6, "row")

    def _quantized_by_itself(self, x: Tensor) -> QuantizedRows:
        from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows

        return quantize_rows(x, "row")

    def _writes_codes(self, gemm: QuantizedRowsGemm) -> bool:
        """Whether the kernel quantizes x for the GEMM, which else does so itself.

        Few gates and ups in fp8 are multiplied, on Hopper, by a GEMM that computes silu_mul and
        leaves its output in 16 bits.
        """
        few = self._rows <= MAX_ROWS and gemm.kind in ("row", "block")
        if self._after == "silu_mul" and few and is_hopper(self._x.device):
            return False
        return self._after is not None

    def _plain(self) -> Tensor:
        if self._held:
            from model_zoo.layers.kernels.hold import hold

            hold(self._x.device, HELD_NS)
            return self._x
        from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
        from model_zoo.layers.kernels.silu_mul import silu_mul

        if self._after == "silu_mul":
            return silu_mul(self._source)
        add_rms_norm(self._x, self._source, self._ones, 1e-6)
        return self._x

    def _quantized(self, gemm: QuantizedRowsGemm) -> QuantizedRows:
        from model_zoo.layers.quantized_gemm.quantize_rows import (
            add_rms_norm_quantize,
            silu_mul_quantize,
        )

        if self._after == "silu_mul":
            return silu_mul_quantize(self._source, gemm.kind)
        return add_rms_norm_quantize(self._x, self._source, self._ones, 1e-6, gemm.kind)


class GemmTimer:
    """Times GEMMs of x [rows, K] with `weights` [N, K] in turn; owns the captured graphs."""

    def __init__(
        self,
        weights: Sequence[Weight],
        bias: Tensor | None,
        rows: int,
        dtype: torch.dtype,
        *,
        after: Producer | None = None,
        gate: Gate | None = None,
        held: bool = False,
        leaves_scales: bool = False,
    ) -> None:
        """dtype: of x; after, held, leaves_scales: as in SmallKernel; gate: of a layer, computed
        after the product"""
        self._weights, self._bias, self._gate = weights, bias, gate
        long = rows > MAX_ROWS
        self._least = MIN_LONG_CALLS if long else MIN_CALLS
        self._replays = LONG_REPLAYS if long else REPLAYS
        device, inputs = weights[0].device, weights[0].shape[1]
        options = {"held": held, "leaves_scales": leaves_scales}
        self._before = SmallKernel(after, rows, inputs, dtype=dtype, device=device, **options)
        self._stream = side_stream(device)

    def microseconds(self, gemms: Sequence[GemmImpl]) -> list[float]:
        """Median time of a call of each GEMM, interleaved so that disturbances affect all."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graphs = [self._captured(gemm) for gemm in gemms]
            return replayed_us(graphs, self._calls(), self._replays)

    def _calls(self) -> int:
        return calls_of(self._weights[0].nbytes, len(self._weights), self._least)

    def _captured(self, gemm: GemmImpl) -> torch.cuda.CUDAGraph:
        self._before.run_with(gemm, self._weights[0], self._bias, self._gate)  # compiles
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in range(self._calls()):
            weight = self._weights[call % len(self._weights)]
            self._before.run_with(gemm, weight, self._bias, self._gate)
        graph.capture_end()
        return graph


def calls_of(num_bytes: int, weights: int, least: int) -> int:
    """Calls of a replay, over so many weights of so many bytes in turn; least: as MIN_CALLS.

    More calls than weights read nothing that is colder.  With the 850 calls that read COLD_BYTES of
    gpt-oss's routers, 4 MB in all layers, a start had no time left for the other layers.
    """
    if num_bytes < SMALL_BYTES:
        least = SMALL_CALLS
    cold = min(-(-COLD_BYTES // num_bytes), weights)
    return max(cold, min(least, -(-LONG_BYTES // num_bytes)))


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


def times(
    layers: Sequence[Linear], gemms: Sequence[GemmImpl], rows: int, gate: Gate | None
) -> list[float]:
    """Microseconds of each GEMM for `rows` rows, over the weights of all layers.

    gate: as of GemmTimer
    """
    if len(gemms) == 1:
        return [0.0]
    weights = [layer.operand for layer in layers]
    first = layers[0]
    timer = GemmTimer(
        weights,
        first.bias,
        rows,
        first.dtype,
        after=first.after,
        gate=gate,
        held=first.between_attention_and_experts,
        leaves_scales=any(isinstance(gemm, UnscaledGemm) for gemm in gemms),
    )
    return timer.microseconds(gemms)
