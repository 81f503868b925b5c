"""GEMMs of few rows on Hopper with W in fp8, multiplied by x in fp8.

SkinnyFp8Gemm      x is quantized before, by rows or by blocks of 128 columns
ConvertingFp8Gemm  x is of 16 bits, and the kernel quantizes each unit of it: no pass before it, and
                   norms as of SkinnyGemm
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.planned_kernel import multiprocessors
from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    SHARED_BYTES,
    TILES,
    Gate,
    GatingGemm,
    NormingGemm,
    block_m,
    units_in_flight,
    workspace,
)
from model_zoo.layers.normed_rows import Norm, NormedRows
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import GROUP, QuantizedRows, QuantizedRowsGemm, ScaleKind

Ring = tuple[int, ...]
# Largest number of rows -> (block_n, block_k, stages, x_stages): units of 32 KiB.
RINGS: dict[int, tuple[Ring, ...]] = {
    8: ((32, 1024, 6, 3), (64, 512, 6, 3), (16, 2048, 5, 3)),
    16: ((32, 1024, 5, 3), (64, 512, 6, 3)),
    32: ((64, 512, 5, 3),),
    64: ((64, 512, 3, 3),),
}
# The same, and units of codes, of x in 16 bits.  Of more rows the kernel would read as many bytes
# of x as of W.
CONVERTING_RINGS: dict[int, tuple[Ring, ...]] = {
    8: ((32, 1024, 5, 2, 2), (64, 512, 5, 4, 3)),
    16: ((64, 512, 4, 4, 2),),
}
MAX_CONVERTED_ROWS = max(CONVERTING_RINGS)


@dataclass(frozen=True, slots=True)
class _Fp8Gemm:
    """hopper/fp8_gemm_kernel.py: compute capability 9.0."""

    kind: ScaleKind  # "row" or "block", as of ScaledMM: of W's scales, too
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

    @property
    def max_rows(self) -> int:
        return MAX_ROWS

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        tiles, blocks = -(-outputs // self.block_n), -(-inputs // self.block_k)
        parts_bytes = 4 * 2 * self.programs * self.block_n * block_m(rows, 8)
        fits = tiles <= TILES and parts_bytes <= PARTS_BYTES and self.x_stages <= self.stages
        fits = fits and rows <= self.max_rows and self.fold * block_m(rows, 8) <= 2 * MAX_ROWS
        return fits and inputs % 16 == 0 and blocks % self.split_units == 0

    def x_bytes(self, height: int) -> int:
        """Of x in shared memory, a unit of which has so many rows."""
        return self.x_stages * height * self.block_k

    def gates(self, rows: int, weight: PackedWeight) -> bool:
        """As GatingGemm.gates."""
        height = block_m(rows, 8)
        rings = self.stages * self.block_n * self.block_k + self.x_bytes(height)
        return rings + 4 * 64 * self.fold * height <= SHARED_BYTES

    def _ahead(self, device: torch.device) -> int:
        """Units of W that a program asks for at once: more where SMs are idle."""
        share = max(1, round(multiprocessors(device) / self.programs))
        return units_in_flight(self.block_n * self.block_k, self.stages, 1 / share)

    def launch(
        self,
        x: QuantizedRows | Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        out: Tensor,
        gate: Gate | None,
        *,
        code_stages: int = 0,
        x_norm: NormedRows | None = None,
        total: NormedRows | None = None,
    ) -> None:
        """out = x W^T + bias, or its gate.

        code_stages  of x in 16 bits
        x_norm       x is its `weighted`
        total        out is the residual, and this is to be the norm of the sum
        """
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.quantized_gemm.hopper.fp8_gemm_kernel import skinny_fp8_gemm

        outputs, inputs = weight.shape
        assert ScaledMM(self.kind).multiplies(weight) and self.serves(len(x), outputs, inputs)
        codes = weight.words.view(torch.float8_e4m3fn)  # [N, K], in the order of x.codes
        halves = 1 if gate is None else 2
        parts, arrived = workspace(codes.device)
        rows, scales = (x.codes, x.scales) if isinstance(x, QuantizedRows) else (x, parts)
        k_blocks, height = -(-inputs // self.block_k), block_m(len(x), 8)
        units, columns = -(-outputs // self.block_n) * k_blocks, self.block_k // self.fold
        skinny_fp8_gemm[(min(self.programs, units // self.split_units),)](
            tma_desc(codes, [self.block_n // halves, columns]),
            tma_desc(rows, [height, columns]), parts, arrived, out, bias, scales, weight.scales,
            out if total is None else total.weighted, parts if total is None else total.squares,
            parts if x_norm is None else x_norm.squares,
            out if total is None else total.norm.weight, int(total is not None),
            0 if x_norm is None else len(x_norm.squares),
            int(total is not None and total.norm.plus_one),
            0.0 if x_norm is None else x_norm.norm.eps, len(rows), len(x), outputs, inputs,
            k_blocks, self.split_units, self._ahead(codes.device), inputs // GROUP, FOLD=self.fold,
            STAGES=self.stages, X_STAGES=self.x_stages, CODE_STAGES=code_stages,
            BY_BLOCK=self.kind == "block", GATE=gate or "", num_warps=4,
            maxnreg=_registers(height, code_stages), **dependent_launch(codes.device),
        )  # fmt: skip


def _registers(height: int, code_stages: int) -> int:
    """Per thread, without spills.  As few as that: other kernels run beside this one, which waits
    for them, and with all registers taken it would not have begun to load."""
    if code_stages:
        return 72 if height == 8 else 80
    return 96 if height < MAX_ROWS else 216


@dataclass(frozen=True, slots=True)
class SkinnyFp8Gemm(_Fp8Gemm, QuantizedRowsGemm, GatingGemm):
    """Of QuantizedRows, or of a Tensor that a pass quantizes."""

    name = "fp8 tensor cores, few rows (Hopper)"

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
        x = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        assert x.kind == self.kind
        outputs = weight.shape[0] // (1 if gate is None else 2)
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=weight.device)
        if len(x):
            self.launch(x, weight, bias, out, gate)
        return out


@dataclass(frozen=True, slots=True)
class ConvertingFp8Gemm(_Fp8Gemm, NormingGemm):
    """Of a Tensor or NormedRows, which the kernel quantizes by units of a row."""

    name = "fp8 tensor cores, few rows of 16 bits (Hopper)"
    code_stages: int = 2  # units of x's codes; at most stages

    @property
    def max_rows(self) -> int:
        return MAX_CONVERTED_ROWS

    def x_bytes(self, height: int) -> int:
        """As of _Fp8Gemm."""
        return (2 * self.x_stages + self.code_stages) * height * self.block_k

    def multiply(
        self, x: Tensor | NormedRows, weight: PackedWeight, bias: Tensor | None, gate: Gate | None
    ) -> Tensor:
        """As GatingGemm.multiply; x may be NormedRows."""
        normed = x if isinstance(x, NormedRows) else None
        plain = x if isinstance(x, Tensor) else x.weighted
        outputs = weight.shape[0] // (1 if gate is None else 2)
        out = plain.new_empty(len(x), outputs)
        if len(x):
            stages = self.code_stages
            self.launch(plain, weight, bias, out, gate, code_stages=stages, x_norm=normed)
        return out

    def add_to(
        self, residual: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None, norm: Norm
    ) -> NormedRows:
        """As NormingGemm.add_to."""
        assert residual.is_contiguous() and residual.dtype == x.dtype
        total = NormedRows.room_for(residual, -(-weight.shape[0] // self.block_n), norm)
        if len(x):
            stages = self.code_stages
            self.launch(x, weight, bias, residual, None, code_stages=stages, total=total)
        return total


def converting_fp8_candidates(
    kind: ScaleKind, programs: int, rows: int, outputs: int, inputs: int
) -> list[ConvertingFp8Gemm]:
    """As skinny_fp8_candidates; none for more than MAX_CONVERTED_ROWS."""
    found = [
        ConvertingFp8Gemm(kind, block_n, block_k, stages, used, units, x_stages, code_stages)
        for block_n, block_k, stages, x_stages, code_stages in _rings(CONVERTING_RINGS, rows)
        for used, units in _programs(block_n, block_k, programs, outputs, inputs)
    ]
    return [gemm for gemm in found if gemm.serves(rows, outputs, inputs)]


def skinny_fp8_candidates(
    kind: ScaleKind, programs: int, rows: int, outputs: int, inputs: int
) -> list[SkinnyFp8Gemm]:
    """Candidates for x [rows, inputs] and W [outputs, inputs] on a device of so many SMs."""
    found = [
        SkinnyFp8Gemm(kind, block_n, block_k, stages, used, units, x_stages)
        for block_n, block_k, stages, x_stages in _rings(RINGS, rows)
        for used, units in _programs(block_n, block_k, programs, outputs, inputs)
    ]
    return [gemm for gemm in found if gemm.serves(rows, outputs, inputs)]


def _rings(rings: Mapping[int, tuple[Ring, ...]], rows: int) -> tuple[Ring, ...]:
    return next((found for limit, found in rings.items() if rows <= limit), ())


def _programs(
    block_n: int, block_k: int, programs: int, outputs: int, inputs: int
) -> list[tuple[int, int]]:
    """-> (programs, units that are not split) to try.

    Whole tiles, on the fewest programs with the same number of waves.  Lower tiles where they are
    at most 1.5 times as many as SMs; tiles that are split among all programs where whole ones are
    fewer than a fourth of the SMs: adding the parts takes 2 to 4 us on an H200, more than reading
    by twice as many SMs saves of Qwen3-8B's GEMMs.
    """
    tiles = math.ceil(outputs / block_n)
    if block_n < 64 and tiles > 1.5 * programs:
        return []
    found = [(math.ceil(tiles / math.ceil(tiles / programs)), math.ceil(inputs / block_k))]
    if block_n == 64 and tiles < programs // 4:
        found.append((programs, 1))
    return found
