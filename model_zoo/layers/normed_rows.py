"""NormedRows: a norm of which the next GEMM computes the last step.

Between two GEMMs of few rows, a kernel that adds the first one's output to the residual and
computes the norm would take longer to start than to run.  The first GEMM adds its output itself,
and stores the sum times the norm's weight; 1 / rms of the sum, one number a row, is known only
when all of it is there, and the second GEMM multiplies its own output by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from attention.common.tma_rows import empty_with_room
from model_zoo.layers.quantized_rows import QuantizedRows


class Norm(Protocol):
    """An RMSNorm."""

    weight: nn.Parameter
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class NormedRows:
    """rms_norm(sum) * weight [T, K] = weighted / sqrt(squares.sum(0) / K + norm.eps), by rows."""

    weighted: Tensor  # [T, K]: the sum times the norm's weight
    squares: Tensor  # float32 [tiles, T], whose columns add up to the squares of the sum's rows
    norm: Norm

    def __len__(self) -> int:
        return len(self.weighted)

    @classmethod
    def room_for(cls, total: Tensor, tiles: int, norm: Norm) -> NormedRows:
        """Uninitialized, of a sum [T, K]."""
        squares = torch.empty(tiles, len(total), dtype=torch.float32, device=total.device)
        weighted = empty_with_room(tuple(total.shape), total.dtype, total.device)
        return cls(weighted, squares, norm)


NormOutput = Tensor | QuantizedRows | NormedRows  # what a norm gives to its consumer
