"""Implementations of silu(gate) * up for many rows, as values that autotune.py times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.bands import tile_grid
from model_zoo.layers.gemm.implementations import GemmImpl

# Numbers of rows that are tuned; each covers smaller ones, the last also larger ones.  Steps are
# padded to these sizes: a GEMM's time rises in steps, at other rows for each implementation.
SIZES = (96, 128, *range(192, 512, 64), *range(512, 2049, 128))


@dataclass(frozen=True, slots=True)
class UnfusedSwiglu:
    """cuBLAS, then silu_mul."""

    name = "cuBLAS then silu_mul"

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [2 I, K], bias [2 I] -> [M, I]."""
        from model_zoo.layers.kernels.silu_mul import silu_mul

        return silu_mul(F.linear(x, weight, bias))


@dataclass(frozen=True, slots=True)
class SwigluGemm:
    """hopper/swiglu.py: compute capability 9.0, no bias."""

    name = "gated (Hopper)"

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether rows are 16-byte aligned, and at least as long as the ring of stages."""
        return rows > 0 and outputs % 16 == 0 and inputs % 8 == 0 and inputs >= 256

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [2 I, K] -> [M, I]."""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.gemm.hopper.many_rows import DEPTH, HALF, ROWS
        from model_zoo.layers.gemm.hopper.swiglu import swiglu_gemm_hopper

        (rows, inputs), outputs = x.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and bias is None and x.stride(1) == 1
        inner = outputs // 2
        out = x.new_empty(rows, inner)
        grid = tile_grid(x.device, rows, inner, inputs, width=HALF.value)
        swiglu_gemm_hopper[(grid.programs,)](
            tma_desc(x, [ROWS.value, DEPTH.value]), tma_desc(weight, [HALF.value, DEPTH.value]),
            tma_desc(out, [ROWS.value, HALF.value]), grid.m_tiles, grid.n_tiles, grid.k_blocks,
            grid.band, inner, num_warps=4, maxnreg=168, **dependent_launch(x.device),
        )  # fmt: skip
        return out


def swiglu_candidates(
    device: torch.device, rows: int, outputs: int, inputs: int, *, bias: bool
) -> list[GemmImpl]:
    """UnfusedSwiglu first, then candidates."""
    candidates: list[GemmImpl] = [UnfusedSwiglu()]
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    if hopper and not bias and SwigluGemm().serves(rows, outputs, inputs):
        candidates.append(SwigluGemm())
    return candidates
