"""PackedWeight: a quantized weight in the order in which kernels read it.

A word of 32 bits holds n = 16 / bits pairs of codes; a code of pair i is in the lower half of the
word, at bits `bits * i`, the other one 16 bits further, so that a mask leaves one pair in the two
halves of a register (fp4: FP4_POSITIONS).  A block is 16 words, 32 * n columns (64 of 8 bits, 128
of 4 bits), word 4 t + u of which holds, at pair i and half e, column 8 (n u + i) + 2 t + e.  Thread
t of four in a row of wgmma's operand A reads columns 8 p + 2 t + e for p = 0, 1, ...: its share of
a block is four consecutive words, and pairs 2 s and 2 s + 1 of them are its operand of the block's
16 columns s.

Codes of int8 are stored less 128, so that their bytes are the int8 numbers that tensor cores take.

Scales of a row and 128 columns lie together, and so do zero points.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.quantization.quantized_weight import BITS, CodeKind, QuantizedWeight
from model_zoo.quantization.weight_scheme import scales_together

WORDS = 16  # in a block
# Bits of fp4's pairs in a word: of the lower code's mantissa, low and high bit of the exponent, and
# sign; those of the upper code are 16 further, modulo 32.  For all but the first pair one rotation
# brings them to the places that they have in a bf16, seven bits between exponent and sign.
FP4_POSITIONS = ((0, 1, 10, 9), (2, 3, 4, 11), (6, 7, 8, 15), (12, 13, 14, 21))
E5M3_BIAS = 10
# Of e8m0, 2^20: larger scales do not fit the factors of hopper/scales.py.
LARGEST_E8M0 = 147
SIGNS = -0x7F7F7F80  # 0x80808080: turns four codes of int8 into int8 numbers, and back


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [N, K] for the kernels; fields as in QuantizedWeight, but for order and dtype."""

    kind: CodeKind
    words: Tensor  # [N, K * bits / 32] int32
    # row_group 1: [K / column_group, N], or [K / 128, N, groups of 128 columns] if these are
    # several, of the checkpoint's dtype (fp4: uint8: of 16 columns E5M3 codes, else the scale's
    # bits); else [ceil(N / row_group), ceil(K / column_group)] float32
    scales: Tensor
    row_group: int
    column_group: int
    zeros: Tensor | None = None  # like scales, uint8
    row_scales: Tensor | None = None  # [N] float32
    permutation: Tensor | None = None  # [K] int64
    sums: Tensor | None = None  # [N] int32, of the words' int8 numbers; of kind int8
    # [N] bfloat16: the scales, if they are such numbers; of fp8 in rows that GEMMs multiply by fp8
    narrow_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.words), self.words.shape[1] * 32 // BITS[self.kind]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        tensors = self.words, self.scales, self.zeros, self.row_scales, self.sums
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def block_columns(bits: int) -> int:
    """Columns of a block; a packed weight's K is a multiple of it."""
    return 32 * (16 // bits)


def pack_codes(codes: Tensor, kind: CodeKind) -> Tensor:
    """codes [N, K] uint8 -> words [N, K * bits / 32] int32; K a multiple of block_columns(bits)."""
    bits = BITS[kind]
    pairs, rows = 16 // bits, len(codes)
    grouped = codes.view(rows, -1, 4, pairs, 4, 2)  # row, block, u, i, t, e
    words = torch.zeros(rows, grouped.shape[1], 4, 4, dtype=torch.int32, device=codes.device)
    for i in range(pairs):
        for e in range(2):
            part = grouped[:, :, :, i, :, e].int().transpose(2, 3)
            for bit, width, position in _fields(kind, i, e):
                words |= (part >> bit & (1 << width) - 1) << position
    return (words ^ SIGNS if kind == "int8" else words).view(rows, -1)


def unpack_codes(words: Tensor, kind: CodeKind) -> Tensor:
    """words [N, W] int32 -> codes [N, 32 * W / bits] uint8: the inverse of pack_codes."""
    pairs, rows = 16 // BITS[kind], len(words)
    words = words ^ SIGNS if kind == "int8" else words
    grouped = words.view(rows, -1, 4, 4).transpose(2, 3)  # row, block, u, t
    shape = (rows, grouped.shape[1], 4, pairs, 4, 2)
    codes = torch.zeros(shape, dtype=torch.uint8, device=words.device)
    for i in range(pairs):
        for e in range(2):
            for bit, width, position in _fields(kind, i, e):
                part = (grouped >> position & (1 << width) - 1) << bit
                codes[:, :, :, i, :, e] |= part.to(torch.uint8)
    return codes.view(rows, -1)


def _fields(kind: CodeKind, pair: int, half: int) -> list[tuple[int, int, int]]:
    """(lowest bit in the code, bits, lowest bit in the word) of the parts of a code."""
    bits = BITS[kind]
    if kind != "fp4":
        return [(0, bits, 16 * half + bits * pair)]
    return [(bit, 1, (at + 16 * half) % 32) for bit, at in enumerate(FP4_POSITIONS[pair])]


def pack(weight: QuantizedWeight) -> PackedWeight:
    """The same weight in the kernels' order."""
    codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    if weight.kind == "fp4" and scales.dtype == torch.float8_e4m3fn:
        scales = _e5m3(scales)
        # The least E5M3 code is no zero to a kernel that only shifts it into an exponent.
        spread = (scales != 0).repeat_interleave(weight.column_group, 1)
        codes = codes * spread[:, : codes.shape[1]]
    elif weight.kind == "fp4":
        scales = scales.view(torch.uint8)
        if (scales > LARGEST_E8M0).any():
            raise ValueError(
                "a scale of an mxfp4 weight is above 2^20 or not a number: the checkpoint is "
                "damaged, or its scales are not of the type e8m0"
            )
    together = scales_together(weight.row_group, weight.column_group)
    return PackedWeight(
        kind=weight.kind,
        words=pack_codes(codes, weight.kind),
        scales=scales.float() if weight.row_group > 1 else _by_columns(scales, together),
        row_group=weight.row_group,
        column_group=weight.column_group,
        zeros=None if zeros is None else _by_columns(zeros, together),
        row_scales=weight.row_scales,
        permutation=weight.permutation,
    )


def _by_columns(grouped: Tensor, together: int) -> Tensor:
    """[N, groups] -> [groups, N], or [groups / together, N, together]; what is missing is zero."""
    if together == 1:
        return grouped.t().contiguous()
    bits = grouped.view(torch.uint8) if grouped.element_size() == 1 else grouped  # for F.pad
    bits = F.pad(bits, (0, -grouped.shape[1] % together))
    ordered = bits.view(len(grouped), -1, together).transpose(0, 1).contiguous()
    return ordered.view(grouped.dtype)


def _e5m3(scales: Tensor) -> Tensor:
    """e4m3 [N, G], not negative -> uint8: the exponent + 10 in five bits, the mantissa in three.

    With a bit more of exponent, and none for the sign, no number but zero is subnormal.
    """
    codes = scales.view(torch.uint8)
    if (codes > 0x7E).any():
        raise ValueError(
            "a scale of an fp4 weight is negative or not a number: the checkpoint is damaged, or "
            "its scales are not of the type e4m3"
        )
    fraction, exponent = torch.frexp(scales.float())  # fraction in [1/2, 1)
    mantissa = (fraction * 16).to(torch.uint8) & 7
    return torch.where(
        codes == 0, codes, (exponent + (E5M3_BIAS - 1)).to(torch.uint8) << 3 | mantissa
    )


def byte_columns(device: torch.device) -> Tensor:
    """[64] int64: the column of each byte of a block of 8-bit codes."""
    columns = torch.arange(64, dtype=torch.uint8, device=device)[None]
    return pack_codes(columns, "fp8").view(torch.uint8).flatten().long()
