"""A decode step without its attention, for bench_gemm: the cost of a GEMM inside a step.

Between the GEMMs run the engine's small kernels, and in place of rope and attention two kernels
that only copy.  All use programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
from model_zoo.layers.kernels.silu_mul import silu_mul

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Of a model of Llama's form."""

    layers: int
    hidden: int
    qkv: int
    mixed: int  # heads * head_dim
    inner: int
    vocab: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        """N, K of each GEMM."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.mixed),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "lm_head": (self.vocab, self.hidden),
        }

    def nbytes(self) -> int:
        """What a step must read: all weights once."""
        times = {"lm_head": 1}
        return sum(2 * n * k * times.get(x, self.layers) for x, (n, k) in self.shapes().items())


MODELS = {
    "qwen3-8b": ModelSizes(36, 4096, 6144, 4096, 12288, 151936),
    "qwen3-0.6b": ModelSizes(28, 1024, 4096, 2048, 3072, 151936),
}


# pass_on: the first columns of each row
#   grid   (row, block of columns)
@triton.jit
def _pass_on(X, OUT, width, kept, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        start_successor_and_wait()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < kept
    tl.store(OUT + row * kept + column, tl.load(X + row * width + column, mask=real), mask=real)


GemmFunction = Callable[[str, Tensor, Tensor], Tensor]  # its name, x, weights -> x W^T


class Chain:
    """The GEMMs of a step of `rows` rows, in order, with small kernels between them."""

    def __init__(self, sizes: ModelSizes, weights: dict[str, list[Tensor]], rows: int) -> None:
        self.sizes, self.weights, self.rows = sizes, weights, rows
        head = weights["lm_head"][0]
        self.first = torch.randn(rows, sizes.hidden, dtype=head.dtype, device=head.device)
        self.ones = torch.ones(sizes.hidden, dtype=head.dtype, device=head.device)

    def run(self, gemm: GemmFunction | None) -> Tensor:
        """Logits; None: the small kernels alone."""
        residual, x = torch.zeros_like(self.first), self.first.clone()

        def project(name: str, x: Tensor, layer: int) -> Tensor:
            weight = self.weights[name][layer]
            if gemm is None:
                return x.new_empty(x.shape[0], weight.shape[0])
            return gemm(name, x, weight)

        for layer in range(self.sizes.layers):
            add_rms_norm(x, residual, self.ones, EPSILON)
            q = self._pass_on(project("qkv", x, layer), self.sizes.mixed)
            x = project("o", self.attend(q, layer), layer)
            add_rms_norm(x, residual, self.ones, EPSILON)
            x = project("down", silu_mul(project("gate_up", x, layer)), layer)
        add_rms_norm(x, residual, self.ones, EPSILON)
        return project("lm_head", x, 0)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """In place of attention: a copy of q [rows, heads * head_dim]."""
        return self._pass_on(q, self.sizes.mixed)

    def _pass_on(self, x: Tensor, kept: int) -> Tensor:
        out = x.new_empty(self.rows, kept)
        _pass_on[(self.rows, triton.cdiv(kept, 1024))](
            x, out, x.shape[1], kept, BLOCK=1024, num_warps=4, **dependent_launch(x.device)
        )
        return out


def random_weights(sizes: ModelSizes, dtype: torch.dtype, device: str) -> dict[str, list[Tensor]]:
    """Normal, of each layer its own: they are far larger than the cache."""
    made: dict[str, list[Tensor]] = {}
    for name, (n, k) in sizes.shapes().items():
        layers = 1 if name == "lm_head" else sizes.layers
        made[name] = [
            torch.randn(n, k, dtype=dtype, device=device).mul_(k**-0.5) for _ in range(layers)
        ]
    return made
