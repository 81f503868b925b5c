"""CountingGemm: a GEMM of few rows that also adds to the residual and computes norms and gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.all_reduce.symmetric_buffers import RankSum
from model_zoo.layers.gemm.implementations import MAX_ROWS, Gate, NormingGemm
from model_zoo.layers.normed_rows import Norm, NormedRows


@dataclass
class CountingGemm(NormingGemm):
    """By PyTorch's operations."""

    name: str = "of a test"
    most_normed: int = MAX_ROWS  # rows, of norms
    done: list[str] = field(default_factory=list)

    def gates(self, rows: int, weight: Any) -> bool:
        return True

    def multiply(
        self, x: Tensor | NormedRows, weight: Tensor, bias: Tensor | None, gate: Gate | None
    ) -> Tensor:
        if isinstance(x, NormedRows):
            self.done.append("norm" if gate is None else "norm and gate")
            mean = x.squares.sum(0)[:, None] / x.weighted.shape[1]
            x = x.weighted * torch.rsqrt(mean + x.norm.eps)
        y = F.linear(x, weight, bias)
        if gate is None:
            return y
        gates, ups = y.chunk(2, -1)
        return (F.gelu(gates, approximate="tanh") if gate == "gelu" else F.silu(gates)) * ups

    def norms(self, rows: int) -> bool:
        return rows <= self.most_normed

    def adds_ranks(self, rows: int) -> bool:
        return False

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        *,
        rank_sum: RankSum | None = None,
    ) -> NormedRows:
        assert rank_sum is None
        self.done.append("add")
        residual += self.multiply(x, weight, bias, None)
        squares = torch.stack([part.sum(1) for part in residual.square().tensor_split(3, 1)])
        return NormedRows(residual * (norm.weight + norm.plus_one), squares, norm)
