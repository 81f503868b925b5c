"""SkinnyQuantizedGemm: y = x W^T of few rows and a packed weight, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from attention.common.tma_rows import empty_with_room, with_rows_behind
from model_zoo.layers.all_reduce.symmetric_buffers import RankSum
from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    SHARED_BYTES,
    TILES,
    Gate,
    NormingGemm,
    block_m,
    norm_arguments,
    units_in_flight,
    workspace,
)
from model_zoo.layers.normed_rows import Norm, NormedRows
from model_zoo.layers.quantized_gemm.dequant_gemm import in_packed_order
from model_zoo.layers.quantized_gemm.hopper.arguments import (
    SYNC_ROWS,
    format_arguments,
    four_together,
)
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.quantized_weight import BITS
from model_zoo.quantization.weight_scheme import BLOCK, WeightScheme

ROWS = 64  # of wgmma
NORM_ROWS = 32  # of x: of more a norm in the kernel takes twice the instructions of its epilogue
WARPS = 4  # that multiply, of a tile of up to 64 weight rows
APART_COLUMNS = 512  # of four warps, 128 each
APART_ROWS = 32  # of x
APART_OUTPUTS = 8  # scales of four rows, and of four gates or ups, lie together
# KiB.  Less than gemm/implementations.IN_FLIGHT: units are smaller, and programs take longer to use
# one.  With 64 in place of 96 a step of Qwen3-8B took an H200 1.77 ms in place of 1.80 in int4 with
# 8 rows of padding, and 2.53 in place of 2.60 with fp8 blocks and one; with 32 for the down
# projections, int4, 8 rows after 1,150 tokens took 2.06 in place of 2.08.
IN_FLIGHT, LESS_IN_FLIGHT = 64, 32
REGISTERS = {1: 168, 2: 128, 3: 80}  # a thread, of so many programs on a multiprocessor


@dataclass(frozen=True, slots=True)
class SkinnyQuantizedGemm(NormingGemm):
    """skinny_hopper.py: compute capability 9.0.  Of more than MAX_ROWS rows, so many at a time."""

    name = "dequantize in registers (Hopper)"
    block_n: int  # weight rows of a tile: 16, 32 or 64, or 128 of two warpgroups; apart: 32 or 64
    block_k: int  # columns of a unit, a power of two
    stages: int  # units of weights in a program's ring
    programs: int
    split_units: int = 1  # tiles are split at multiples of this; divides a tile's units
    x_stages: int = 3  # units of x in a ring of their own, which come from L2; at most stages
    registers: int = 128  # a thread, of all warps: of REGISTERS
    sync: bool = False  # products by mma.sync instead of wgmma
    apart: bool = False  # likewise, of 4-bit weights: each warp has columns of its own, all rows
    in_flight: int = IN_FLIGHT  # KiB of W that `resident` programs together ask for at once

    @property
    def fold(self) -> int:
        """Column runs of a unit that are stacked to the rows of a wgmma, or of four mma.sync."""
        return 1 if self.apart else max(1, ROWS // self.block_n)

    @property
    def groups(self) -> int:
        """Warpgroups that compute."""
        return max(1, self.block_n // ROWS)

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor has registers for."""
        return next(count for count, least in REGISTERS.items() if least <= self.registers)

    def serves(
        self, rows: int, outputs: int, inputs: int, weight: WeightScheme | PackedWeight
    ) -> bool:
        """Whether x [rows, inputs] W^T is computed: in this configuration, of such a weight."""
        bits, height = BITS[weight.kind], _height(rows)
        tiles, blocks = -(-outputs // self.block_n), -(-inputs // self.block_k)
        parts_bytes = 4 * 2 * self.programs * self.block_n * height
        chunk = 32 * 32 // bits  # columns that are loaded from shared memory at once
        return (
            multiplies(weight, inputs)
            and tiles * self.groups <= TILES
            and parts_bytes <= PARTS_BYTES
            and self.x_stages <= self.stages
            and self.shared_bytes(rows, bits) <= SHARED_BYTES
            and self.block_k // self.fold % chunk == 0
            and self.fold * height <= 2 * MAX_ROWS
            and blocks % self.split_units == 0
            and not (self.sync and height > self._sync_rows)
            and (not self.apart or self._has_columns_apart(rows, outputs, weight))
        )

    @property
    def _sync_rows(self) -> int:
        """Of x, that mma.sync multiplies at most."""
        if self.apart:
            return APART_ROWS
        return SYNC_ROWS if self.fold == 1 else 8

    def _has_columns_apart(
        self, rows: int, outputs: int, weight: WeightScheme | PackedWeight
    ) -> bool:
        """Whether warps can have columns of their own, and shared memory has room for their sums
        beside the rings."""
        sums = 4 * WARPS * self.block_n * _height(rows)
        return (
            self.sync
            and self.shared_bytes(rows, BITS[weight.kind]) + sums <= SHARED_BYTES
            and self.block_k % APART_COLUMNS == 0
            and outputs % APART_OUTPUTS == 0
            and BITS[weight.kind] == 4
            and weight.row_group == 1
        )

    def shared_bytes(self, rows: int, bits: int) -> int:
        """Of both rings."""
        weights = self.stages * self.block_n * self.block_k * bits // 8
        return weights + self.x_stages * _height(rows) * self.block_k * 2

    def gates(self, rows: int, weight: PackedWeight) -> bool:
        """As GatingGemm.gates."""
        sums = 4 * ROWS * _height(rows) * self.groups
        return self.shared_bytes(rows, BITS[weight.kind]) + sums <= SHARED_BYTES

    def norms(self, rows: int) -> bool:
        """As NormingGemm.norms."""
        return rows <= NORM_ROWS

    def adds_ranks(self, rows: int) -> bool:
        """As NormingGemm.adds_ranks."""
        return False

    def for_steps(self, weight: PackedWeight) -> list[SkinnyQuantizedGemm]:
        """As NormingGemm.for_steps."""
        less, bits = replace(self, in_flight=LESS_IN_FLIGHT), BITS[weight.kind]
        return [less] if less.ahead(bits) < self.ahead(bits) else []

    def ahead(self, bits: int) -> int:
        """Units of so many bits a code that a program asks for at once."""
        unit_bytes = self.block_n * self.block_k * bits // 8
        return units_in_flight(unit_bytes, self.stages, self.resident, self.in_flight << 10)

    def multiply(
        self, x: Tensor | NormedRows, weight: PackedWeight, bias: Tensor | None, gate: Gate | None
    ) -> Tensor:
        """As GatingGemm.multiply; x may be NormedRows."""
        plain = x.weighted if isinstance(x, NormedRows) else x
        rows, outputs = len(plain), len(weight.words)
        plain = self._padded(plain, weight)
        columns = outputs if gate is None else outputs // 2
        out = empty_with_room((rows, columns), plain.dtype, plain.device)
        if isinstance(x, NormedRows):
            assert self.norms(rows)
            self._multiply(plain, weight, bias, out, gate, source=x)
            return out
        for first in range(0, rows, MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            self._multiply(plain[part], weight, bias, out[part], gate, all_rows=rows)
        return out

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        norm: Norm,
        *,
        rank_sum: RankSum | None = None,
    ) -> NormedRows:
        """As NormingGemm.add_to."""
        assert rank_sum is None and self.norms(len(x))
        assert residual.is_contiguous() and residual.dtype == x.dtype
        tiles = -(-len(weight.words) // self.block_n) * self.groups
        normed = NormedRows.room_for(residual, tiles, norm)
        plain = self._padded(x, weight)
        self._multiply(plain, weight, bias, residual, None, total=normed)
        return normed

    def _padded(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x in the order of the weight's columns, with the rows behind it that a tile has."""
        (rows, inputs), outputs = x.shape, len(weight.words)
        assert inputs == weight.shape[1] and self.serves(rows, outputs, inputs, weight)
        return with_rows_behind(in_packed_order(x, weight), _height(rows))

    def _multiply(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        out: Tensor,
        gate: Gate | None,
        *,
        all_rows: int | None = None,
        source: NormedRows | None = None,
        total: NormedRows | None = None,
    ) -> None:
        """x may have more rows than out.

        all_rows  of which these are a part, so that the last of many need no kernel of their own
        source    x is its `weighted`
        total     out is the residual, and this is to be the norm of the sum
        """
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.quantized_gemm.skinny_hopper import _skinny_quantized_gemm

        rows, inputs, outputs = len(out), x.shape[1], len(weight.words)
        height = _height(rows if all_rows is None else all_rows)
        bits, fold, groups = BITS[weight.kind], self.fold, self.groups
        columns, k_blocks = self.block_k // fold, -(-inputs // self.block_k)
        units = -(-outputs // self.block_n) * k_blocks
        found = format_arguments(weight, x.dtype, inputs, self.sync, self.apart)
        row_scales = weight.scales if found.by_row else weight.row_scales
        box = self.block_n if gate is None else self.block_n // 2 // groups
        parts, arrived = workspace(x.device)
        _skinny_quantized_gemm[(min(self.programs, units // self.split_units),)](
            tma_desc(weight.words, [box, columns * bits // 32]),
            tma_desc(x, [height, columns], found.swizzle),
            four_together(weight.scales, found.per_block),
            four_together(weight.zeros, found.per_block), row_scales, parts, arrived, out, bias,
            *norm_arguments(out, parts, source, total), rows, outputs, inputs, k_blocks,
            self.split_units, self.ahead(bits), -(-inputs // BLOCK),
            **found.constants, GATE=gate or "", APART=self.apart, RAW=found.raw,
            NORMS=height <= NORM_ROWS, FOLD=fold, GROUPS=groups, STAGES=self.stages,
            X_STAGES=self.x_stages, SWIZZLE=found.swizzle,
            REGISTERS=(3 * self.registers - 40) // 16 * 8, num_warps=4, maxnreg=self.registers,
            **dependent_launch(x.device),
        )  # fmt: skip


def multiplies(weight: WeightScheme | PackedWeight, inputs: int) -> bool:
    """Whether the kernel knows the weight's kind of scales."""
    zeros, row_scales = _given(weight.zeros), _given(weight.row_scales)
    if weight.row_group > 1:
        return weight.row_group == weight.column_group == BLOCK and not zeros
    if weight.kind == "fp4":
        return (weight.column_group == 16 and row_scales) or weight.column_group == 32
    if weight.column_group >= inputs:
        return not zeros and not row_scales
    return weight.column_group in (32, 64, 128)


def _given(field: object) -> bool:
    """Whether a PackedWeight has the tensor, or a WeightScheme says so."""
    return field is not None and field is not False


def _height(rows: int) -> int:
    """Rows of x of a tile."""
    return block_m(min(rows, MAX_ROWS), 8)
