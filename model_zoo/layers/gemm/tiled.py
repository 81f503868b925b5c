"""Products of many rows by tile_hopper.py, as values: what may be timed and chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

CACHED = 20 << 20  # bytes of x that stay in the L2 cache while weights pass by


@dataclass(frozen=True, slots=True)
class Tiled:
    """How a product is cut; compute capability 9.0."""

    rows: int  # of x in half a tile: 64 or 128
    columns: int  # of a tile: 128 or 256
    stages: int  # 64 columns of x and W each
    lead: int = 2  # stages by which the first half of the rows is ahead of the second

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """x [rows, inputs], W [outputs, inputs]; outputs is even if gated."""
        return rows > 0 and inputs % 8 == 0 and inputs >= 64 * self.stages and outputs % 16 == 0

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K], weight [N, K] -> x W^T [M, N]."""
        return self._run(x, weight, gated=False)

    def run_gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K], weight [2 I, K] -> silu(gate) * up [M, I]: gates are the first I products."""
        return self._run(x, weight, gated=True)

    def _run(self, x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
        from attention.kernels.launch import dependent_launch
        from model_zoo.layers.gemm.stream_hopper import boxes
        from model_zoo.layers.gemm.tile_hopper import tile_hopper

        (rows, inputs), outputs = x.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and x.stride(1) == 1
        half = self.columns // 2
        width, step = (outputs // 2, half) if gated else (outputs, self.columns)
        out = x.new_empty(rows, width)
        height = 2 * self.rows
        m_tiles, n_tiles = -(-rows // height), -(-width // step)
        group = max(1, min(m_tiles, CACHED // (2 * height * inputs)))
        tile_hopper[(min(m_tiles * n_tiles, _programs(x.device)),)](
            boxes(x, self.rows, 64), boxes(weight, half, 64), boxes(out, self.rows, half),
            m_tiles, n_tiles, -(-inputs // 64), group, step, width if gated else half,
            STAGES=self.stages, LEAD=self.lead, GATED=gated, num_warps=4, maxnreg=168,
            **dependent_launch(x.device),
        )  # fmt: skip
        return out


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # compiled for no device: tests/compile_for_hopper.py
    return torch.cuda.get_device_properties(device).multi_processor_count
