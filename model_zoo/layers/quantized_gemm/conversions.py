"""PTX that converts a word of packed codes to weights of 16 bits, for hopper/convert.py.

Weights are exact, but for a factor, a power of two that the kernel undoes, and the scale of int4:

    int4   fp16: code - zero, from a code below the exponent of 1024, whose ulp is 1
           bf16: (code - zero) / 2^6 (INT4_SCALED_DOWN).  Bits 0 to 7 of a number whose other bits
           are zero are a whole number times 2^-133, as the lowest bit of the exponent makes it
           normal with the same ulp.  So codes that are masked in two pairs' places are code times
           2^-133, and times 2^-129 in every second pair; one FMA multiplies them by 2^127 or
           2^123 and takes off zero / 2^6.  A scale is multiplied, rounded once, if one is given:
           times 2^6, for weights without the factor
           raw: these subnormal numbers, for kernels that correct sums of products
    int8   code - zero, by an exponent above the code, too; words hold codes - 128
    fp8    the code's bits in the exponent and mantissa of a subnormal, times 2^120 (fp16: 2^8)
    fp4    alike, times 2^126 (fp16: 2^14), and times the scale where factors() says so; then the
           factor is 1 / SCALED_DOWN
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from model_zoo.layers.quantized_gemm.packed_weight import FP4_POSITIONS
from model_zoo.quantization.quantized_weight import BITS, CodeKind

# The factor by which weights are too small where scales are multiplied into them, so that the
# product stays in range.  The code of a scale of 16 columns is its exponent + 10 in 5 bits and 3
# bits of mantissa, that of 32 columns its exponent + 127 (packed_weight.py).
SCALED_DOWN = {"bf16": 2.0**19, "fp16": 2.0**5}
# Of int4 in bf16.  For raw codes x, which is below 2^63, is multiplied by the first of RAW_X, and
# where it meets a second pair by the other one.
INT4_SCALED_DOWN, RAW_SCALED_DOWN = 2.0**6, 2.0**69
RAW_X = 2.0**64, 2.0**60

_AND_OR, _AND_XOR = "0xEA", "0x6A"  # lop3's tables of (a & b) | c and (a & b) ^ c
_HALF = {"bf16": "bf16x2", "fp16": "f16x2"}


def _asm(lines: list[str], results: list[str], *, halves: bool = False) -> str:
    """halves: outputs are the halves of the results."""
    outputs = [f"{{${2 * i}, ${2 * i + 1}}}" if halves else f"${i}" for i in range(len(results))]
    parts = [f"mov.b32 {to}, {x};" for to, x in zip(outputs, results, strict=True)]
    return "{\n.reg .b32 p<4>, s<6>;\n" + "\n".join(lines + parts) + "\n}"


# Bits 0 to 7 hold two pairs, so one shift brings the other two there.
_RAW = [
    "and.b32 p0, $4, 0x000F000F;",
    "and.b32 p1, $4, 0x00F000F0;",
    "shr.b32 s1, $4, 8;",
    "and.b32 p2, s1, 0x000F000F;",
    "and.b32 p3, s1, 0x00F000F0;",
]


def _int4_bf16(zeros: bool) -> list[str]:
    """$5: the zero point times -1/64, in both halves."""
    lines = [*_RAW, "mov.b32 s0, 0x7F007F00;", "mov.b32 s3, 0x7D007D00;"]
    lines += [] if zeros else ["mov.b32 s2, 0xBE00BE00;"]  # of 8
    zero = "$5" if zeros else "s2"
    return lines + [
        f"fma.rn.bf16x2 p{i}, p{i}, {'s3' if i % 2 else 's0'}, {zero};" for i in range(4)
    ]


def _int4_fp16(zeros: bool) -> list[str]:
    """$5: the zero point below the exponent of the codes, in both halves."""
    lines = ["mov.b32 s2, $5;" if zeros else "mov.b32 s2, 0x64086408;"]
    for i in range(4):
        lines += [f"shr.b32 s1, $4, {4 * i};"] if i else []
        lines += [f"lop3.b32 p{i}, {'s1' if i else '$4'}, 0x000F000F, 0x64006400, {_AND_OR};"]
        lines += [f"sub.f16x2 p{i}, p{i}, s2;"]
    return lines


def _int4(dtype: str, zeros: bool, scale: str) -> str:
    """The scale comes after the zero point, and is multiplied, rounded once; of bf16 it is given
    times INT4_SCALED_DOWN.

    scale  its type: of 16 bits, that of the weights, in both halves; or of the weights bf16 in
           "f32"; "" without one
    """
    lines = _int4_bf16(zeros) if dtype == "bf16" else _int4_fp16(zeros)
    factor = f"${5 + zeros}"
    for i in range(4):
        if scale == "f32":
            lines += [f"shl.b32 s4, p{i}, 16;", f"and.b32 s5, p{i}, 0xFFFF0000;"]
            lines += [f"mul.f32 s{j}, s{j}, {factor};" for j in (4, 5)]
            lines += [f"cvt.rn.bf16x2.f32 p{i}, s5, s4;"]
        elif scale:
            lines += [f"mul.{_HALF[dtype]} p{i}, p{i}, {factor};"]
    return _asm(lines, ["p0", "p1", "p2", "p3"])


def _int8(dtype: str, zeros: bool) -> str:
    """$5: bf16: the zero point - 128; fp16: the zero point below the exponent of the codes.

    In bf16 the sign decides whether 256 or 128 is subtracted from 128 + the other bits.
    """
    lines = ["shr.b32 s1, $4, 8;"]
    lines += ["mov.b32 s2, 0x64806480;"] if dtype == "fp16" and not zeros else []
    for i, source in enumerate(("$4", "s1")):
        if dtype == "fp16":
            lines += [f"lop3.b32 p{i}, {source}, 0x00FF00FF, 0x64806480, {_AND_XOR};"]
            lines += [f"sub.f16x2 p{i}, p{i}, {'$5' if zeros else 's2'};"]
            continue
        lines += [f"lop3.b32 p{i}, {source}, 0x007F007F, 0x43004300, {_AND_OR};"]
        lines += [f"lop3.b32 s0, {source}, 0x00800080, 0x43004300, {_AND_OR};"]
        lines += [f"sub.bf16x2 p{i}, p{i}, s0;"]
        lines += [f"sub.bf16x2 p{i}, p{i}, $5;"] if zeros else []
    return _asm(lines, ["p0", "p1"], halves=True)


def _fp8(dtype: str) -> str:
    shift, mask, factor = {"bf16": (4, "07F007F0", "7B80"), "fp16": (1, "3F803F80", "5C00")}[dtype]
    lines = [
        f"mov.b32 s3, 0x{factor}{factor};",
        f"shl.b32 s0, $4, {8 - shift};",
        "shl.b32 s1, $4, 8;",
        f"and.b32 s0, s0, 0x{mask};",
        f"lop3.b32 p0, s1, 0x80008000, s0, {_AND_OR};",
        f"shr.b32 s2, $4, {shift};",
        f"and.b32 s2, s2, 0x{mask};",
        f"lop3.b32 p1, $4, 0x80008000, s2, {_AND_OR};",
        f"mul.{_HALF[dtype]} p0, p0, s3;",
        f"mul.{_HALF[dtype]} p1, p1, s3;",
    ]
    return _asm(lines, ["p0", "p1"], halves=True)


def _fp4(dtype: str, scales: int) -> str:
    """scales: 1: $5 is the factor, in both halves; 2: of the first two pairs, and $6 of others."""
    targets, factor = {"bf16": ((6, 7, 8, 15), "7E80"), "fp16": ((9, 10, 11, 15), "7400")}[dtype]
    lines = [] if scales and dtype == "bf16" else [f"mov.b32 s3, 0x{factor}{factor};"]
    for i, positions in enumerate(FP4_POSITIONS):
        masks: dict[int, int] = {}  # of the bits that a rotation brings to their place
        for position, target in zip(positions, targets, strict=True):
            left = (target - position) % 32
            masks[left] = masks.get(left, 0) | 0x10001 << target
        for number, (left, mask) in enumerate(masks.items()):
            lines += [_rotate("s0", "$4", left, mask)] if left else []
            source = "s0" if left else "$4"
            lines += [
                f"lop3.b32 p{i}, {source}, 0x{mask:08X}, p{i}, {_AND_OR};"
                if number
                else f"and.b32 p{i}, {source}, 0x{mask:08X};"
            ]
        if not (scales and dtype == "bf16"):
            lines += [f"mul.{_HALF[dtype]} p{i}, p{i}, s3;"]
        if scales:
            lines += [f"mul.{_HALF[dtype]} p{i}, p{i}, {'$5' if i < 2 or scales == 1 else '$6'};"]
    return _asm(lines, ["p0", "p1", "p2", "p3"])


def _rotate(to: str, source: str, left: int, mask: int) -> str:
    """The bits of mask in `to` are those of source rotated; as a shift, if it brings them there."""
    if mask & ((1 << left) - 1) == 0:
        return f"shl.b32 {to}, {source}, {left};"
    if mask >> left == 0:
        return f"shr.b32 {to}, {source}, {32 - left};"
    return f"shf.l.wrap.b32 {to}, {source}, {source}, {left};"


class Conversion(NamedTuple):
    """For inline_asm_elementwise: a word, and arguments for it, to its weights, pair after pair."""

    ptx: str
    constraints: str


def factors(kind: CodeKind, dtype: str, column_group: int) -> int:
    """Scales that are multiplied into the weights of a word: those of fp4, where that is exact.

    Those of 32 columns, any powers of two, are out of the range of fp16.
    """
    if kind != "fp4":
        return 0
    return 2 if column_group == 16 else int(dtype == "bf16")


def may_be_raw(kind: CodeKind, dtype: str) -> bool:
    """Whether there are conversions that leave zero points to who corrects sums of products.

    None to fp16, whose exponents do not reach so far.
    """
    return kind == "int4" and dtype == "bf16"


@cache
def conversion(
    kind: CodeKind,
    dtype: str,
    zeros: bool,
    scales: int,
    *,
    raw: bool = False,
    scale: str = "",
) -> Conversion:
    """dtype: "bf16" or "fp16"; zeros: zero points are given; scales: of factors().

    raw    the zero point is not subtracted, and none of the arguments
    scale  as of _int4, for which `scales` is 1 if it is given
    """
    assert kind != "int4" or scales == bool(scale)
    zeros = zeros and not raw
    if raw:
        ptx = _asm(_RAW, ["p0", "p1", "p2", "p3"])
    elif kind == "int4":
        ptx = _int4(dtype, zeros, scale)
    elif kind == "int8":
        ptx = _int8(dtype, zeros)
    elif kind == "fp8":
        ptx = _fp8(dtype)
    else:
        ptx = _fp4(dtype, scales)
    inputs = 1 + zeros + scales
    # As pairs ptxas moves none of them; with 8 bits, of which there are fewer, it moves none either
    # way, but of halves a kernel by wgmma with 80 registers a thread has more registers left.
    outputs = ["=r"] * 4 if BITS[kind] == 4 else ["=h"] * 4
    return Conversion(ptx, ",".join(outputs + ["r"] * inputs))
