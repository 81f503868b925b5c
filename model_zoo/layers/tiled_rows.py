"""TiledRows: x in fp8 with a scale for each 64 columns of a row, and the GEMMs that hand it on.

Whoever computes 64 columns of a row knows the largest of them, and need not wait for the others: a
GEMM of few rows can store its output in fp8, and no kernel between two GEMMs has to quantize it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import Gate, block_m
from model_zoo.layers.normed_rows import Norm

TILE_COLUMNS = 64  # of a scale, as in gemm/hopper/codes.py


@dataclass(frozen=True, slots=True)
class TileOrder:
    """The order of scales of 1 x 64 columns: that in which a GEMM reads its units."""

    fold: int  # column runs of a unit
    steps: int  # scales of a run


@dataclass(frozen=True, slots=True)
class TiledRows:
    """x [M, K] as codes with a scale for each 64 columns of a row (gemm/hopper/codes.py).

    With squares it is a norm of which 1 / rms is missing, as NormedRows.
    """

    codes: Tensor  # [M, K] float8_e4m3fn, in the order of packed 8-bit blocks
    scales: Tensor  # float32 [K / 64 / fold, fold * height]
    order: TileOrder
    dtype: torch.dtype  # of x
    squares: Tensor | None = None  # float32 [tiles, M]
    norm: Norm | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def room_for(
        cls,
        x: tuple[int, int],
        order: TileOrder,
        dtype: torch.dtype,
        device: torch.device,
        norm: Norm | None = None,
    ) -> TiledRows:
        """Uninitialized, for x [M, K]; norm: with its squares, of tiles of 64 columns."""
        rows, columns = x
        assert columns % TILE_COLUMNS == 0, "codes are in blocks of 64"
        unit = order.fold * order.steps * TILE_COLUMNS
        shape = -(-columns // unit) * order.steps, order.fold * block_m(rows, 8)
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        squares = None
        if norm is not None:
            squares = torch.empty(-(-columns // TILE_COLUMNS), rows, device=device)
        return cls(codes, torch.empty(shape, device=device), order, dtype, squares, norm)


class TiledRowsGemm(ABC):
    """A GEMM of few rows that takes TiledRows, and can store its output as such."""

    __slots__ = ()

    @property
    @abstractmethod
    def order(self) -> TileOrder:
        """That of the TiledRows that it takes."""

    @property
    @abstractmethod
    def gates(self) -> bool:
        """Whether it has `gated`."""

    @property
    @abstractmethod
    def adds(self) -> bool:
        """Whether it has `add_to`."""

    @abstractmethod
    def tiled(self, x: Tensor | TiledRows) -> TiledRows:
        """x [M, K] in 16 bits is quantized."""

    @abstractmethod
    def multiply(self, x: TiledRows, weight: Any, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N] in 16 bits."""

    @abstractmethod
    def gated(
        self, x: TiledRows, weight: Any, bias: Tensor | None, gate: Gate, order: TileOrder
    ) -> TiledRows:
        """x [M, K], weight [2 N, K] -> activation(gate) * up [M, N], for a GEMM with that order."""

    @abstractmethod
    def add_to(
        self,
        residual: Tensor,
        x: TiledRows,
        weight: Any,
        bias: Tensor | None,
        norm: Norm,
        order: TileOrder,
    ) -> TiledRows:
        """residual [M, N] += x W^T + bias -> the norm of it, for a GEMM with that order."""

    def run(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As GemmImpl.run."""
        return self.multiply(self.tiled(x), weight, bias)
