"""PackedManyRowsGemm: y = x W^T of many rows and a packed weight of 4 bits, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.gemm import bands
from model_zoo.layers.gemm.implementations import PARTS_BYTES, TILES, workspace
from model_zoo.layers.quantized_gemm import skinny
from model_zoo.layers.quantized_gemm.conversions import conversion, factors
from model_zoo.layers.quantized_gemm.dequant_gemm import in_packed_order
from model_zoo.layers.quantized_gemm.hopper.arguments import (
    NAMES,
    format_arguments,
    four_together,
)
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.quantized_weight import BITS
from model_zoo.quantization.weight_scheme import BLOCK, WeightScheme

WIDTHS = (64, 128, 256)
PARTED = 128  # the widest tiles whose columns may be in parts: to add wider ones takes too long
TILE_ROWS = 128  # of W: two warpgroups' HEIGHT of the kernel
CHUNK = 256  # columns of W, of which a part has whole ones
# What a chunk of columns takes besides its rows of x, since its codes are converted, in rows of x,
# and what adding a part's sums takes for each row, in chunks: by the times of an H200 in
# docs/lab/quantized-weights.md.
CONVERSION_ROWS, ADDING_CHUNKS = 96, 4


@dataclass(frozen=True, slots=True)
class PackedManyRowsGemm:
    """hopper/packed_many_rows.py: compute capability 9.0."""

    name = "dequantize in registers, many rows (Hopper)"
    width: int  # rows of x of a tile: one of WIDTHS
    parts: int = 1  # of a tile's columns, which different programs have; 1 above PARTED

    def serves(
        self,
        rows: int,
        dtype: torch.dtype,
        outputs: int,
        inputs: int,
        weight: WeightScheme | PackedWeight,
    ) -> bool:
        """Whether x [rows, inputs] W^T is computed, x being of the type and W such a weight."""
        tiles = -(-rows // self.width) * -(-outputs // TILE_ROWS)
        divides = self.parts == 1 or (
            self.width <= PARTED
            and -(-inputs // CHUNK) % self.parts == 0
            and 4 * self.parts * tiles * TILE_ROWS * self.width <= PARTS_BYTES
            and 2 * tiles <= TILES
        )
        return divides and outputs % 8 == 0 and multiplies(weight, dtype, inputs)

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.quantized_gemm.hopper import packed_many_rows as kernel

        (rows, inputs), (outputs, columns) = x.shape, weight.shape
        assert inputs == columns and self.serves(rows, x.dtype, outputs, inputs, weight)
        out = x.new_empty(rows, outputs)
        if rows == 0:
            return out
        x = in_packed_order(x, weight)
        found = format_arguments(weight, x.dtype, inputs, False)
        per_block, constants = found.per_block, dict(found.constants)
        if weight.kind == "int4" and per_block:
            scale = NAMES[x.dtype] if weight.scales.dtype == x.dtype else "f32"
            made = conversion("int4", NAMES[x.dtype], weight.zeros is not None, 1, scale=scale)
            constants |= {"PTX": made.ptx, "CONSTRAINTS": made.constraints}
        wide = self.width > 128
        depth = 64 if wide else 128  # columns of a stage of x
        # Columns that are multiplied at once have one scale, or factors of 32 or 16.
        step = depth if constants["FACTORS"] else min(depth, 128 // max(1, per_block))
        swizzle = min(128, 2 * step)
        m_tiles, n_tiles = -(-rows // self.width), -(-outputs // TILE_ROWS)
        cached = max(1, bands.CACHED // (x.itemsize * self.width * inputs))
        programs, band = bands.bands(m_tiles, n_tiles, cached, bands.processors(x.device))
        if self.parts > 1:
            programs = min(bands.processors(x.device), m_tiles * n_tiles * self.parts)
        parts, arrived = workspace(x.device)
        names = "PTX", "CONSTRAINTS", "DTYPE", "PER_BLOCK", "FACTORS", "FACTOR"
        kernel.packed_many_rows[(programs,)](
            tma_desc(x, [self.width, depth], swizzle),
            tma_desc(weight.words, [TILE_ROWS, CHUNK * BITS[weight.kind] // 32]),
            tma_desc(out, [min(self.width, kernel.PART.value), kernel.HEIGHT.value]),
            four_together(weight.scales, per_block), four_together(weight.zeros, per_block),
            weight.scales if found.by_row else weight.row_scales, parts, arrived, bias, outputs,
            m_tiles, n_tiles, -(-inputs // CHUNK) // self.parts, self.parts, band,
            -(-inputs // BLOCK),
            **{name: constants[name] for name in names}, STEP=step, SWIZZLE=swizzle,
            STAGES=2 if wide else 4, X_STAGES=4,
            num_warps=4, maxnreg=168, **dependent_launch(x.device),
        )  # fmt: skip
        return out


def multiplies(weight: WeightScheme | PackedWeight, dtype: torch.dtype, inputs: int) -> bool:
    """Whether the kernel knows the weight's kind of scales, with x of the type."""
    if weight.row_group > 1 or BITS[weight.kind] != 4 or not skinny.multiplies(weight, inputs):
        return False
    if weight.kind == "fp4":
        return factors("fp4", NAMES[dtype], weight.column_group) > 0
    scales = weight.scales.dtype if isinstance(weight, PackedWeight) else weight.scale_dtype
    return weight.column_group >= inputs or scales == dtype or dtype == torch.bfloat16


def many_rows_gemms(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    scheme: WeightScheme,
) -> list[PackedManyRowsGemm]:
    """Candidates for x [rows, inputs] of the type and W [outputs, inputs], on a GPU: a Hopper's.

    Tiles of few rows of x are in parts where whole ones would leave half of the processors idle.
    """
    found: list[PackedManyRowsGemm] = []
    if torch.cuda.get_device_capability(device) != (9, 0):
        return found
    for width in WIDTHS:
        tiles = -(-rows // width) * -(-outputs // TILE_ROWS)
        for parts in (1, 2, 4):
            gemm = PackedManyRowsGemm(width, parts)
            fills = parts == 1 or tiles * parts <= bands.processors(device)
            if width < 2 * rows and fills and gemm.serves(rows, dtype, outputs, inputs, scheme):
                found.append(gemm)
    return found


def usual_gemm(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    scheme: WeightScheme,
) -> PackedManyRowsGemm | None:
    """The candidate that should take least time, where none has been timed; None: there are none.

    Waves of programs times what a chunk takes, and of parts what adding their sums takes.
    """

    def chunks(gemm: PackedManyRowsGemm) -> float:
        tiles = -(-rows // gemm.width) * -(-outputs // TILE_ROWS)
        waves = -(-tiles * gemm.parts // bands.processors(device))
        of_part = -(-inputs // CHUNK) / gemm.parts
        adding = ADDING_CHUNKS * gemm.parts * gemm.width if gemm.parts > 1 else 0
        return waves * of_part * (gemm.width + CONVERSION_ROWS) + adding

    found = many_rows_gemms(device, dtype, rows, outputs, inputs, scheme)
    return min(found, key=chunks, default=None)
