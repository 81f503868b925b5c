"""Device functions of the kernels that read a PackedWeight: codes and scales to float32.

They need no float type of fewer than 16 bits, which GPUs before compute capability 8.9 lack: the
bits of a code become those of a float of 16 or 32 bits, but for a power of two, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_zoo.layers.quantized_gemm.packed_weight import (
    E5M3_BIAS,
    FP4_POSITIONS,
    PackedWeight,
)
from model_zoo.quantization.quantized_weight import CodeKind
from model_zoo.quantization.weight_scheme import BLOCK, scales_together

SCALE_COLUMNS = tl.constexpr(BLOCK)  # whose scales lie together
E5M3_EXPONENT = tl.constexpr((127 - E5M3_BIAS) << 23)  # what E5M3's is short of float32's
# By pair: the rotation of a word that brings the lowest bit of both fp4 codes to bit 6 of its half.
FP4_LEFT = tl.constexpr(tuple((6 - positions[0]) % 32 for positions in FP4_POSITIONS))


@triton.jit
def _values(words, KIND: tl.constexpr):
    """words [N, W] int32 of whole blocks -> [N, 32 / bits * W] float32 in the order of columns.

    Both codes of a pair become float16 at once.  An integer is the end of the mantissa of
    1024 + code, which is what is returned.  Of floats, the bits below the sign become the last of
    the exponent and the first of the mantissa: what is returned is the value divided by UNIT.  The
    two codes of e4m3 that are NaN, which no weight has, become 480 and -480.
    """
    BITS: tl.constexpr = 8 if KIND == "int8" or KIND == "fp8" else 4
    PAIRS: tl.constexpr = 16 // BITS
    BLOCKS: tl.constexpr = words.shape[1] // 16
    pair = tl.arange(0, PAIRS).reshape(1, 1, 1, 1, PAIRS)
    words = words.reshape(words.shape[0], BLOCKS, 4, 4, 1)  # row, block, t, u
    if KIND == "int4":
        both = ((words >> (4 * pair)) & 0x000F000F) | 0x64006400
    elif KIND == "int8":
        both = ((words >> (8 * pair)) & 0x00FF00FF) ^ 0x64806480  # words hold codes - 128
    elif KIND == "fp4":
        both = fp4_pairs(words, pair)
        both = (both & (-0x7FFF8000)) | ((both << 3) & 0x0E000E00)  # 0x80008000
    else:
        high = words << (8 - 8 * pair)  # each code at the upper end of its half
        both = (high & (-0x7FFF8000)) | ((high >> 1) & 0x3F803F80)  # 0x80008000
    first = both.to(tl.uint16).to(tl.float16, bitcast=True)
    second = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    values = tl.join(first, second).to(tl.float32)
    values = values.permute(0, 1, 3, 4, 2, 5)  # row, block, u, pair, t, half
    return values.reshape(words.shape[0], BLOCKS * 32 * PAIRS)


@triton.jit
def fp4_pairs(words, pair):
    """Both codes of each pair as in a bfloat16: a sign, and bits 6 to 8 (FP4_POSITIONS)."""
    later = tl.where(pair == 2, FP4_LEFT[2], FP4_LEFT[3])
    left = tl.where(pair == 0, FP4_LEFT[0], tl.where(pair == 1, FP4_LEFT[1], later))
    bits = words.to(tl.uint32, bitcast=True)
    turned = (bits << left) | (bits >> ((32 - left) & 31))
    # The highest bit but the sign of the first pair is not where the rotation of the others has it.
    both = turned & tl.where(pair == 0, 0x80C080C0, 0x81C081C0)
    both |= tl.where(pair == 0, (bits >> 2) & 0x01000100, 0)
    return both.to(tl.int32, bitcast=True)


@triton.jit
def to_scale(scales, SCALE: tl.constexpr):
    """Scales as stored -> float32."""
    if SCALE == "e5m3":
        codes = scales.to(tl.int32)
        bits = tl.where(codes == 0, 0, (codes << 20) + E5M3_EXPONENT)
        return bits.to(tl.float32, bitcast=True)
    if SCALE == "e8m0":
        codes = scales.to(tl.int32)
        bits = tl.where(codes == 255, 0x7FC00000, tl.where(codes == 0, 0x400000, codes << 23))
        return bits.to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@triton.jit
def scale_places(
    n, column, scale_row, scale_column, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr
):
    """-> [N, columns]: where the scales and zero points of columns of rows n are."""
    # scales_together(ROW_GROUP, COLUMN_GROUP)
    ALONE: tl.constexpr = ROW_GROUP > 1 or SCALE_COLUMNS % COLUMN_GROUP != 0
    TOGETHER: tl.constexpr = 1 if ALONE else SCALE_COLUMNS // COLUMN_GROUP
    group = column // COLUMN_GROUP
    of_group = group // TOGETHER * scale_column + group % TOGETHER
    return (n // ROW_GROUP)[:, None] * scale_row + of_group[None, :]


@triton.jit
def load_weight(
    WORDS, SCALES, ZEROS, n, start, N, K, scale_row, scale_column,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr,
    RUN: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Columns start.. of rows n of a weight, without row_scales -> [BLOCK_N, BLOCK_K] float32.

    RUN     columns that are sure to have one scale; divides COLUMN_GROUP and BLOCK_K
    SCALED  False: without scales and divided by UNIT, which is exact in 16 bits
    Rows and columns beyond the weight are arbitrary numbers, no NaN.
    """
    BITS: tl.constexpr = 8 if KIND == "int8" or KIND == "fp8" else 4
    BLOCK_N: tl.constexpr = n.shape[0]
    RUNS: tl.constexpr = BLOCK_K // RUN
    width, first = K * BITS // 32, start * BITS // 32
    word = first + tl.arange(0, BLOCK_K * BITS // 32)
    at = WORDS + n.to(tl.int64)[:, None] * width + word[None, :]
    words = tl.load(at, mask=(n < N)[:, None] & (word < width)[None, :], other=0)
    column = start + RUN * tl.arange(0, RUNS)
    real = (n < N)[:, None] & (column < K)[None, :]
    place = scale_places(n, column, scale_row, scale_column, ROW_GROUP, COLUMN_GROUP)
    values = _values(words, KIND).reshape(BLOCK_N, RUNS, RUN)
    if ZEROS is not None:
        zeros = tl.load(ZEROS + place, mask=real, other=0)
        values -= (zeros.to(tl.float32) + 1024.0)[:, :, None]
    elif KIND == "int4" or KIND == "int8":
        values -= 1024.0 + (1 << (BITS - 1))
    if SCALED:
        scales = to_scale(tl.load(SCALES + place, mask=real, other=0), SCALE)
        values *= (scales * UNIT)[:, :, None]
    return values.reshape(BLOCK_N, BLOCK_K)


FP4_SCALES = {16: "e5m3", 32: "e8m0"}  # by column_group
# By kind: 2^(15 - 1) and 2^(15 - 7), of the exponents' biases of float16, e2m1 and e4m3.
UNITS: dict[CodeKind, float] = {"int4": 1.0, "int8": 1.0, "fp4": 2.0**14, "fp8": 2.0**8}


@dataclass(frozen=True, slots=True)
class Decoding:
    """What load_weight needs to know of a weight's scales."""

    scales: Tensor
    scale_row: int  # strides of scales: of groups of rows, and of groups of columns that lie apart
    scale_column: int
    kind: str  # "float", "e5m3" or "e8m0"
    unit: float  # what the kernel's float values are divided by
    run: int  # the largest power of two that divides column_group

    def run_of(self, block_k: int) -> int:
        return min(self.run, block_k)


def decoding(weight: PackedWeight) -> Decoding:
    """Raises ValueError for scales of 8 bits that are neither E5M3 nor e8m0."""
    scales, kind = weight.scales, "float"
    if scales.dtype == torch.float8_e8m0fnu:
        kind = "e8m0"
    elif scales.dtype == torch.uint8:
        kind = FP4_SCALES.get(weight.column_group, "")
        if not kind:
            raise ValueError(
                f"fp4 weights with groups of {weight.column_group} columns have unknown scales: "
                "groups of 16 have e4m3 (NVFP4), groups of 32 e8m0 (MXFP4)"
            )
    if kind != "float":
        scales = scales.view(torch.uint8)
    blocks, together = weight.row_group > 1, scales_together(weight.row_group, weight.column_group)
    row, column = (scales.stride(0), 1) if blocks else (together, scales.stride(0))
    run = weight.column_group & -weight.column_group
    return Decoding(scales, row, column, kind, UNITS[weight.kind], run)


def scale_is_per_row(weight: PackedWeight) -> bool:
    """Whether a row has one scale, which can multiply sums over the row's columns."""
    return weight.row_group == 1 and weight.column_group >= weight.shape[1]
