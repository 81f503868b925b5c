"""SkinnyFp8Gemm: y = x W^T of few rows on Hopper, with both in fp8."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    SHARED_BYTES,
    TILES,
    Gate,
    GatingGemm,
    block_m,
    units_in_flight,
    workspace,
)
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import GROUP, QuantizedRows, QuantizedRowsGemm, ScaleKind

# Per thread, up to 32 rows: without spills, and so few that other kernels fit beside this one,
# which else would not begin to load while they run.
FEW_REGISTERS = 96
# Largest number of rows -> (block_n, block_k, stages, x_stages): units of 32 KiB.
RINGS = {
    8: ((32, 1024, 6, 3), (64, 512, 6, 3), (16, 2048, 5, 3)),
    16: ((32, 1024, 5, 3), (64, 512, 6, 3)),
    32: ((64, 512, 5, 3),),
    64: ((64, 512, 3, 3),),
}


@dataclass(frozen=True, slots=True)
class SkinnyFp8Gemm(QuantizedRowsGemm, GatingGemm):
    """hopper/fp8_gemm_kernel.py: compute capability 9.0."""

    name = "fp8 tensor cores, few rows (Hopper)"
    kind: ScaleKind  # "row" or "block", as of ScaledMM
    block_n: int  # weight rows of a tile: 16, 32 or 64
    block_k: int  # columns of a unit: a multiple of 128 for each of its stacked column runs
    stages: int  # units of weights in a program's ring
    programs: int
    split_units: int = 1  # tiles are split at multiples of this; divides a tile's units
    x_stages: int = 3  # units of x in a ring of their own, which come from L2; at most stages

    @property
    def fold(self) -> int:
        """Column runs of a unit that are stacked to the 64 rows of a wgmma."""
        return 64 // self.block_n

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        tiles, blocks = -(-outputs // self.block_n), -(-inputs // self.block_k)
        parts_bytes = 4 * 2 * self.programs * self.block_n * block_m(rows, 8)
        fits = tiles <= TILES and parts_bytes <= PARTS_BYTES and self.x_stages <= self.stages
        fits = fits and rows <= MAX_ROWS and self.fold * block_m(rows, 8) <= 2 * MAX_ROWS
        return fits and inputs % 16 == 0 and blocks % self.split_units == 0

    def gates(self, rows: int, weight: PackedWeight) -> bool:
        """As GatingGemm.gates."""
        height = block_m(rows, 8)
        rings = (self.stages * self.block_n + self.x_stages * height) * self.block_k
        return rings + 4 * 64 * self.fold * height <= SHARED_BYTES

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As QuantizedRowsGemm.product."""
        return self.multiply(x, weight, bias, None)

    def multiply(
        self,
        x: Tensor | QuantizedRows,
        weight: PackedWeight,
        bias: Tensor | None,
        gate: Gate | None,
    ) -> Tensor:
        """As GatingGemm.multiply; x may be quantized."""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.quantized_gemm.hopper.fp8_gemm_kernel import skinny_fp8_gemm

        x = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        outputs, inputs = weight.shape
        assert x.kind == self.kind and ScaledMM(self.kind).multiplies(weight)
        assert self.serves(len(x), outputs, inputs)
        codes = weight.words.view(torch.float8_e4m3fn)  # [N, K], in the order of x.codes
        halves = 1 if gate is None else 2
        out = torch.empty(len(x), outputs // halves, dtype=x.dtype, device=codes.device)
        if len(x) == 0:
            return out
        parts, arrived = workspace(codes.device)
        k_blocks, height = -(-inputs // self.block_k), block_m(len(x), 8)
        units, columns = -(-outputs // self.block_n) * k_blocks, self.block_k // self.fold
        skinny_fp8_gemm[(min(self.programs, units // self.split_units),)](
            tma_desc(codes, [self.block_n // halves, columns]),
            tma_desc(x.codes, [height, columns]), parts, arrived, out, bias, x.scales,
            weight.scales, len(x.codes), len(x), outputs, k_blocks, self.split_units,
            units_in_flight(self.block_n * self.block_k, self.stages), inputs // GROUP,
            FOLD=self.fold, STAGES=self.stages, X_STAGES=self.x_stages,
            BY_BLOCK=self.kind == "block", GATE=gate or "", num_warps=4,
            maxnreg=FEW_REGISTERS if height < MAX_ROWS else 216,
            **dependent_launch(codes.device),
        )  # fmt: skip
        return out


def skinny_fp8_candidates(
    kind: ScaleKind, programs: int, rows: int, outputs: int, inputs: int
) -> list[SkinnyFp8Gemm]:
    """Candidates for x [rows, inputs] and W [outputs, inputs] on a device of so many SMs.

    Whole tiles, on the fewest programs with the same number of waves.  Lower tiles where they are
    at most 1.5 times as many as SMs; tiles that are split among all programs where whole ones are
    fewer than a fourth of the SMs: adding the parts takes 2 to 4 us on an H200, more than reading
    by twice as many SMs saves of Qwen3-8B's GEMMs.
    """
    rings = next(rings for limit, rings in RINGS.items() if rows <= limit)
    found: list[SkinnyFp8Gemm] = []
    for block_n, block_k, stages, x_stages in rings:
        tiles = math.ceil(outputs / block_n)
        if block_n < 64 and tiles > 1.5 * programs:
            continue
        used = math.ceil(tiles / math.ceil(tiles / programs))
        blocks = math.ceil(inputs / block_k)
        found.append(SkinnyFp8Gemm(kind, block_n, block_k, stages, used, blocks, x_stages))
        if block_n == 64 and tiles < programs // 4:
            split = SkinnyFp8Gemm(kind, block_n, block_k, stages, programs, 1, x_stages)
            found.append(split)
    return [gemm for gemm in found if gemm.serves(rows, outputs, inputs)]
