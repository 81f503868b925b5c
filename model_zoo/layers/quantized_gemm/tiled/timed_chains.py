"""Chains: all layers of a model as chains, with GEMMs that are set in all of them and timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.gemm.implementations import GemmImpl, supports_kernels
from model_zoo.layers.gemm.timing import MIN_CALLS, REPLAYS, calls_of, replayed_us, side_stream
from model_zoo.layers.quantized_gemm.candidates import scaled_mm
from model_zoo.layers.quantized_gemm.tiled.candidates import Output, tiled_candidates
from model_zoo.layers.quantized_gemm.tiled.chain import Chain, Place
from model_zoo.layers.row_parallel import RowParallelLinear

OUTPUTS: dict[Place, Output] = {
    "qkv": "plain", "out": "added", "gate_up": "gated", "down": "added",
}  # fmt: skip
Gemms = dict[Place, GemmImpl | None]


def multiplies(chain: Chain) -> bool:
    """Whether TiledFp8Gemm multiplies all its weights, and ranks add nothing to the products."""
    return all(
        linear.packed is not None
        and not linear.is_batch_invariant
        and not isinstance(linear, RowParallelLinear)
        and supports_kernels(linear.device, linear.dtype)
        and linear.packed.scheme.row_group == 1
        and scaled_mm(
            linear.device, linear.dtype, linear.outputs, linear.inputs, linear.packed.scheme
        ) is not None
        for linear in chain.linears.values()
    )  # fmt: skip


class Chains:
    """The chains of consecutive layers, of one shape."""

    def __init__(self, chains: Sequence[Chain], rows: int) -> None:
        self._chains, self.rows = chains, rows
        first = chains[0]
        device, dtype = first.qkv.device, first.qkv.dtype
        # Rows of different sizes, so that a wrong 1 / rms is seen.
        sizes = torch.logspace(-4, -1, rows, base=2, dtype=dtype, device=device)[:, None]
        self._residual, self._attended = (
            torch.randn(rows, columns, dtype=dtype, device=device) * sizes
            for columns in (first.qkv.inputs, first.out.inputs)
        )

    def gemms(self) -> Gemms:
        return {
            place: linear.gemm_of(self.rows) for place, linear in self._chains[0].linears.items()
        }

    def use(self, gemms: Gemms) -> None:
        for chain in self._chains:
            for place, linear in chain.linears.items():
                gemm = gemms[place]
                if gemm is not None:
                    linear.use_gemms({self.rows: gemm})

    @contextmanager
    def using(self, gemms: Gemms) -> Iterator[None]:
        before = self.gemms()
        self.use(gemms)
        try:
            yield
        finally:
            self.use(before)

    def run(self, layers: int) -> tuple[Addend | None, Tensor]:
        """The first layers, of which the last one's output may still have to be added."""
        added: Addend | None = None
        residual = self._residual
        for chain in self._chains[:layers]:
            added, residual = chain.run(added, residual, self._attended)
        return added, residual

    def candidates(self) -> list[Gemms]:
        """First one with a GEMM for each place, then those with another in one place; or none."""
        device = self._residual.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        found = {
            place: tiled_candidates(
                processors, self.rows, linear.outputs, linear.inputs, OUTPUTS[place]
            )
            for place, linear in self._chains[0].linears.items()
        }
        if not all(found.values()):
            return []
        first: Gemms = {place: gemms[0] for place, gemms in found.items()}
        others = [(place, gemm) for place, gemms in found.items() for gemm in gemms[1:]]
        return [first, *({**first, place: gemm} for place, gemm in others)]

    def microseconds(self, choices: Sequence[Gemms]) -> list[float]:
        """Of a layer, with each of the choices."""
        layers = calls_of(self._chains[0].nbytes, len(self._chains), MIN_CALLS)
        layers = min(layers, len(self._chains))
        stream = side_stream(self._residual.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graphs = [self._captured(gemms, layers) for gemms in choices]
            return replayed_us(graphs, layers, REPLAYS)

    def _captured(self, gemms: Gemms, layers: int) -> torch.cuda.CUDAGraph:
        with self.using(gemms):
            self.run(layers)  # compiles
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            self.run(layers)
            graph.capture_end()
        return graph

    def error(self, gemms: Gemms) -> float:
        """Of what two layers add to a row of the residual, at most, beside the GEMMs that are set.

        It may be NaN.
        """
        expected = self._change()
        with self.using(gemms):
            off = self._change() - expected
        return float((off.norm(dim=1) / expected.norm(dim=1).clamp(1e-30)).max())

    def _change(self) -> Tensor:
        """Of the residual by two layers, in float32."""
        start = self._residual.clone()
        added, residual = self.run(2)
        total = residual.float() + (added.float() if isinstance(added, Tensor) else 0.0)
        self._residual.copy_(start)
        return total - start.float()
