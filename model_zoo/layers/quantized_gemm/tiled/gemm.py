"""TiledFp8Gemm: fp8 GEMMs of few rows on Hopper that hand codes to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    SHARED_BYTES,
    TILES,
    Gate,
    block_m,
    units_in_flight,
    workspace,
)
from model_zoo.layers.normed_rows import Norm
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.tiled_rows import TILE_COLUMNS, TiledRows, TiledRowsGemm, TileOrder

REGISTERS = {8: 96, 16: 96, 32: 128, 64: 216}  # per thread, by the columns of a wgmma


@dataclass(frozen=True, slots=True)
class TiledFp8Gemm(TiledRowsGemm):
    """hopper/tiled_gemm_kernel.py: compute capability 9.0, W's scales of rows."""

    name = "fp8 tensor cores, few rows, codes from the GEMM before (Hopper)"
    block_n: int  # weight rows of a tile: 32, 64 or 128
    block_k: int  # columns of a unit: a multiple of 64 for each of its stacked column runs
    stages: int  # units of weights in a program's ring
    programs: int
    split_units: int = 1  # tiles are split at multiples of this; divides a tile's units
    x_stages: int = 3  # units of x in a ring of their own, which come from L2; at most stages

    @property
    def fold(self) -> int:
        """Column runs of a unit that are stacked to the 64 rows of a wgmma."""
        return max(1, 64 // self.block_n)

    @property
    def order(self) -> TileOrder:
        """As TiledRowsGemm.order."""
        return TileOrder(self.fold, self.block_k // self.fold // TILE_COLUMNS)

    @property
    def gates(self) -> bool:
        """As TiledRowsGemm.gates: a tile has 64 columns of gates, and those of ups."""
        return self.block_n == 2 * TILE_COLUMNS

    @property
    def adds(self) -> bool:
        """As TiledRowsGemm.adds: a tile has the columns of one scale."""
        return self.block_n == TILE_COLUMNS

    def tiled(self, x: Tensor | TiledRows) -> TiledRows:
        """As TiledRowsGemm.tiled."""
        if isinstance(x, TiledRows):
            return x
        from model_zoo.layers.quantized_gemm.tiled.tile_rows import tile_rows

        return tile_rows(x, self.order)

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        if self.block_n not in (32, 64, 128) or self.block_k % (self.fold * TILE_COLUMNS):
            return False
        tiles, height = -(-outputs // self.block_n), block_m(rows, 8)
        parts_bytes = 4 * 2 * self.programs * self.block_n * height
        scale_bytes = 4 * self.order.steps * self.fold * height  # of a unit: aligned for TMA
        rings = (self.stages * self.block_n + self.x_stages * height) * self.block_k
        rings += self.x_stages * scale_bytes
        fits = tiles <= TILES and parts_bytes <= PARTS_BYTES and self.x_stages <= self.stages
        fits = fits and rows <= MAX_ROWS and self.fold * height <= MAX_ROWS
        fits = fits and scale_bytes % 128 == 0
        fits = fits and rings + 4 * self.fold * self.block_n * height <= SHARED_BYTES
        # Scales of columns past the end would be anything, times codes of 0.
        return fits and inputs % (self.block_k * self.split_units) == 0

    def multiply(self, x: TiledRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As TiledRowsGemm.multiply."""
        out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.codes.device)
        self._launch(x, weight, bias, out, None, None)
        return out

    def gated(
        self, x: TiledRows, weight: PackedWeight, bias: Tensor | None, gate: Gate, order: TileOrder
    ) -> TiledRows:
        """As TiledRowsGemm.gated."""
        assert self.gates, "a tile has other columns of the output"
        shape = len(x), weight.shape[0] // 2
        found = TiledRows.room_for(shape, order, x.dtype, x.codes.device)
        self._launch(x, weight, bias, found.codes, gate, found)
        return found

    def add_to(
        self,
        residual: Tensor,
        x: TiledRows,
        weight: PackedWeight,
        bias: Tensor | None,
        norm: Norm,
        order: TileOrder,
    ) -> TiledRows:
        """As TiledRowsGemm.add_to."""
        assert self.adds, "a tile has other columns of the output"
        assert residual.is_contiguous() and residual.dtype == x.dtype
        shape = len(x), weight.shape[0]
        found = TiledRows.room_for(shape, order, x.dtype, x.codes.device, norm)
        self._launch(x, weight, bias, residual, None, found)
        return found

    def _launch(
        self,
        x: TiledRows,
        weight: PackedWeight,
        bias: Tensor | None,
        out: Tensor,
        gate: Gate | None,
        found: TiledRows | None,
    ) -> None:
        """found: codes of the gated output, or with a norm of its sum with `out`, the residual"""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.quantized_gemm.hopper.tiled_gemm_kernel import tiled_fp8_gemm

        (outputs, inputs), rows = weight.shape, len(x)
        assert ScaledMM("row").multiplies(weight) and self.serves(rows, outputs, inputs)
        if rows == 0:
            return
        words = weight.words.view(torch.float8_e4m3fn)  # [N, K], in the order of x.codes
        parts, arrived = workspace(words.device)
        k_blocks, height = -(-inputs // self.block_k), block_m(rows, 8)
        assert x.order == self.order and x.scales.shape[1] == self.fold * height
        units, columns = -(-outputs // self.block_n) * k_blocks, self.block_k // self.fold
        norm = None if found is None else found.norm
        order = self.order if found is None else found.order
        tiled_fp8_gemm[(min(self.programs, units // self.split_units),)](
            tma_desc(words, [self.block_n // (1 if gate is None else 2), columns]),
            tma_desc(x.codes, [height, columns]),
            tma_desc(x.scales, [self.order.steps, self.fold * height], swizzle=0), parts, arrived,
            out, bias, weight.scales, None if found is None else found.codes,
            None if found is None else found.scales,
            parts if found is None or found.squares is None else found.squares,
            parts if x.squares is None else x.squares, out if norm is None else norm.weight,
            int(norm is not None), 0 if x.squares is None else len(x.squares),
            int(norm is not None and norm.plus_one), 0.0 if x.norm is None else x.norm.eps, rows,
            outputs, inputs, k_blocks, self.split_units,
            units_in_flight(self.block_n * self.block_k, self.stages),
            FOLD=self.fold, STAGES=self.stages, X_STAGES=self.x_stages, OUT_FOLD=order.fold,
            OUT_STEPS=order.steps, GATE=gate or "", num_warps=4,
            maxnreg=REGISTERS[self.fold * height], **dependent_launch(words.device),
        )  # fmt: skip
