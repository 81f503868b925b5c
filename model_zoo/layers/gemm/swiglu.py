"""Implementations of silu(gate) * up for many rows, as values that autotune.py times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import GemmImpl

# Numbers of rows that are tuned; each covers smaller ones, the last also larger ones.  Steps are
# padded to these sizes: a GEMM's time rises in steps, at other rows for each implementation.
SIZES = (96, 128, *range(192, 512, 64), *range(512, 2049, 128))
CACHED = 20 << 20  # bytes of x that stay in the L2 cache while weights are streamed
MAX_BAND = 16  # rows of tiles: with more, x is reused for too few columns at a time
FEW_MORE = 1.03  # accepted factor of waves for programs that keep to one row of tiles


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
        from model_zoo.layers.gemm.hopper.swiglu import (
            DEPTH,
            GROUPS,
            HALF,
            ROWS,
            swiglu_gemm_hopper,
        )

        (rows, inputs), outputs = x.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and bias is None and x.stride(1) == 1
        inner, height = outputs // 2, GROUPS.value * ROWS.value
        out = x.new_empty(rows, inner)
        m_tiles, n_tiles = -(-rows // height), -(-inner // HALF.value)
        cached = max(1, CACHED // (2 * height * inputs))
        programs, band = bands(m_tiles, n_tiles, cached, _programs(x.device))
        swiglu_gemm_hopper[(programs,)](
            tma_desc(x, [ROWS.value, DEPTH.value]), tma_desc(weight, [HALF.value, DEPTH.value]),
            tma_desc(out, [ROWS.value, HALF.value]), m_tiles, n_tiles, -(-inputs // DEPTH.value),
            band,
            inner, num_warps=4, maxnreg=168, **dependent_launch(x.device),
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


@cache
def bands(m_tiles: int, n_tiles: int, cached: int, processors: int) -> tuple[int, int]:
    """-> (programs, rows of tiles in a band) for m_tiles by n_tiles.

    If the programs are a multiple of the band, each keeps to its row of tiles, and those in a
    column read the same weights at the same time.  On an H100 at its power limit a kernel with the
    same loop took 2 to 4 % less time so, for 2,048 to 8,192 rows, though 4 of 132 SMs are idle
    (docs/lab/gemm.md, "GEMMs of many rows").

    cached  rows of tiles of x that stay in the L2 cache
    """
    tiles, most = m_tiles * n_tiles, min(m_tiles, cached)
    fewest = -(-tiles // processors)  # waves
    highest = min(most, MAX_BAND, processors)
    for band in range(highest, highest // 2, -1):  # smaller bands reread the weights too often
        programs = processors // band * band
        if m_tiles % band == 0 and -(-tiles // programs) <= FEW_MORE * fewest:
            return min(programs, tiles), band
    return min(processors, tiles), most


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # compiled for no device: tests/support/kernels/compile_for_hopper.py
    return torch.cuda.get_device_properties(device).multi_processor_count
