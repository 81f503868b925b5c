"""Device functions that turn words of a PackedWeight into bfloat16, two weights at a time.

load_weight_bf16 gives what load_weight does, rounded to bfloat16, with a third of the instructions:
the bits of both codes of a pair become those of two bfloat16 in one register, and one instruction
multiplies both.  Experts of few tokens need that: load_weight would take longer than the memory.

    fp4   exact, but for a factor: the scale, of E5M3 or e8m0, times 2^100 times the code's bits,
          which are 2^-126 times its value; so a weight is 2^-26 of what it should be.  Scales are
          to be from 2^-100 to 2^27, as all of weights are, or zero where the codes are
    fp8   exact and without scales, which multiply sums: bits that are 2^-120 times the value, times
          2^120.  The two codes that are NaN, which no weight has, become 480 and -480
    int4  code - zero, exact, times a bfloat16 scale, rounded once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.common.softmax import INTERPRETED
from model_zoo.layers.quantized_gemm.decode import fp4_pairs, scale_places
from model_zoo.layers.quantized_gemm.packed_weight import E5M3_BIAS, PackedWeight

# What sums of products are multiplied by, by kind.
SUM_FACTORS = {"fp4": 2.0**26, "fp8": 1.0, "int4": 1.0}
BLOCK_COLUMNS = 128  # of fp8 weights: steps whose sums have one scale
# Powers of two in both halves.
TWO_120 = tl.constexpr(0x7B807B80)
E5M3_EXPONENTS = tl.constexpr((127 + 100 - E5M3_BIAS) * 0x00800080)  # of 2^100 times an E5M3
MIDDLE = tl.constexpr(0x43084308)  # 128 + 8


@triton.jit
def _rounded(values):
    """float32 -> the bits of bfloat16, to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return ((pair >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(a, b):
    """Products of two pairs of bfloat16, each in an int32."""
    if INTERPRETED:
        product = _rounded(_low(a) * _low(b)) | (_rounded(_high(a) * _high(b)) << 16)
    else:  # -0 is added: compute capability 8.0 has no multiplication alone
        product = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return product


@triton.jit
def _subtract(a, b):
    """Differences of two pairs of bfloat16."""
    if INTERPRETED:
        difference = _rounded(_low(a) - _low(b)) | (_rounded(_high(a) - _high(b)) << 16)
    else:
        difference = tl.inline_asm_elementwise(
            "{ .reg .b32 minus; mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, $2, minus, $1; }",
            "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return difference


@triton.jit
def _halves(pair):
    """The two bfloat16 of each int32; an instruction that names halves costs nothing."""
    if INTERPRETED:
        first = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return first, second


@triton.jit
def _factors(scales, SCALE: tl.constexpr):
    """Scales as stored -> bfloat16 in both halves of an int32; those of fp4 times 2^100."""
    if SCALE == "e8m0":
        factors = (scales.to(tl.int32) + 100) * 0x00800080  # into both exponents
    elif SCALE == "e5m3":
        factors = scales.to(tl.int32) * 0x00100010 + E5M3_EXPONENTS
    else:
        factors = (scales.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x00010001
    return factors


@triton.jit
def _spread(groups, BLOCKS: tl.constexpr, RUN: tl.constexpr):
    """[N, columns / RUN] of 4-bit codes -> what broadcasts to [N, block, t, u, pair].

    Pair i of word 4 t + u of a block has columns 32 u + 8 i + 2 t and the next one.
    """
    N: tl.constexpr = groups.shape[0]
    if RUN == 16:
        halves = groups.reshape(N, BLOCKS, 1, 8, 1)
        spread = tl.broadcast_to(halves, [N, BLOCKS, 1, 8, 2]).reshape(N, BLOCKS, 1, 4, 4)
    elif RUN == 32:
        spread = groups.reshape(N, BLOCKS, 1, 4, 1)
    elif RUN == 64:
        halves = groups.reshape(N, BLOCKS, 2, 1)
        spread = tl.broadcast_to(halves, [N, BLOCKS, 2, 2]).reshape(N, BLOCKS, 1, 4, 1)
    elif RUN == 128:
        spread = groups.reshape(N, BLOCKS, 1, 1, 1)
    else:
        spread = groups.reshape(N, 1, 1, 1, 1)
    return spread


@triton.jit
def load_weight_bf16(
    WORDS, SCALES, ZEROS, n, start, K, scale_row, scale_column, KIND: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, COLUMN_GROUP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Columns start.. of rows n of a weight of KIND fp4, fp8 or int4 -> [BLOCK_N, BLOCK_K].

    As load_weight, but for a factor of SUM_FACTORS.  All rows n and columns exist.  SCALED: with
    scales, of which RUN columns have one; always for fp4, never for fp8
    """
    BITS: tl.constexpr = 8 if KIND == "fp8" else 4
    PAIRS: tl.constexpr = 16 // BITS
    WORDS_K: tl.constexpr = BLOCK_K * BITS // 32
    BLOCKS: tl.constexpr = WORDS_K // 16
    BLOCK_N: tl.constexpr = n.shape[0]
    width = K * BITS // 32
    word = start * BITS // 32 + tl.arange(0, WORDS_K)
    at = WORDS + n.to(tl.int64)[:, None] * width + word[None, :]
    words = tl.load(at).reshape(BLOCK_N, BLOCKS, 4, 4, 1)  # row, block, t, u
    pair = tl.arange(0, PAIRS).reshape(1, 1, 1, 1, PAIRS)
    column = start + RUN * tl.arange(0, BLOCK_K // RUN)
    place = scale_places(n, column, scale_row, scale_column, 1, COLUMN_GROUP)
    if KIND == "int4":
        both = ((words >> (4 * pair)) & 0x000F000F) | 0x43004300  # 128 + code
        if ZEROS is not None:
            zeros = tl.load(ZEROS + place).to(tl.int32)
            both = _subtract(both, _spread((zeros | 0x4300) * 0x10001, BLOCKS, RUN))
        else:
            both = _subtract(both, tl.full([1, 1, 1, 1, 1], MIDDLE, tl.int32))
    elif KIND == "fp4":
        both = fp4_pairs(words, pair)
    else:
        high = words << (8 - 8 * pair)
        both = (high & (-0x7FFF8000)) | ((high >> 4) & 0x07F007F0)
        both = _multiply(both, tl.full([1, 1, 1, 1, 1], TWO_120, tl.int32))
    if SCALED:
        both = _multiply(both, _spread(_factors(tl.load(SCALES + place), SCALE), BLOCKS, RUN))
    first, second = _halves(both)
    values = tl.join(first, second).permute(0, 1, 3, 4, 2, 5)  # row, block, u, pair, t, half
    return values.reshape(BLOCK_N, BLOCK_K)


def decodes_to_bf16(weight: PackedWeight, scale_run: int) -> bool:
    """Whether load_weight_bf16 reads the weight; scale_run: columns that are sure of one scale."""
    per_row = weight.row_group == 1 and weight.column_group >= weight.shape[1]
    if weight.kind == "fp8":
        blocks = weight.column_group == BLOCK_COLUMNS
        return weight.scales.dtype == torch.float32 and (per_row or blocks)
    if weight.row_group > 1 or not (per_row or scale_run >= 16):
        return False
    exact = per_row or weight.scales.dtype == torch.bfloat16
    return weight.kind == "fp4" or (weight.kind == "int4" and exact)
