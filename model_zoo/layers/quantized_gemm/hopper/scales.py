"""Scales and zero points of packed weights in the threads that have the weights, in Gluon.

    prefetch     ask for those of some rows to be in the L2 cache
    of_rows      load those of rows and a run of columns: [HEIGHT, elements]
    of_step      one of them for each row
    add_scaled   sums + the products of a step times their scale
    zero_points  those of a step, and
    multipliers  scales that are multiplied into the weights, as convert.py takes them

Four scales or zero points of 8 bits of a row and 128 columns, or eight, are int32 elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from model_zoo.layers.quantized_gemm.hopper.convert import columns_layout, take

HEIGHT = gl.constexpr(64)  # rows of a warpgroup's products
SCALE_COLUMNS = gl.constexpr(128)  # whose scales lie together
LINE = gl.constexpr(128)  # bytes of the L2 cache that are asked for at once


@gluon.constexpr_function
def elements(packed: bool, per_block: int) -> int:
    """Of a row's scales of SCALE_COLUMNS columns; packed: four of 8 bits are one element."""
    return per_block // 4 if packed else per_block


@gluon.jit
def prefetch(SCALES, first_row, first_block, N, scale_blocks, ROWS: gl.constexpr,
             BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr):  # fmt: skip
    """Ask for the scales, or zero points, of ROWS rows and BLOCKS blocks of columns."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    IN_LINE: gl.constexpr = LINE * 8 // SCALES.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = max(1, ROWS * EACH // IN_LINE)
    i = gl.arange(0, max(32, LINES * BLOCKS), gl.BlockedLayout([1], [32], [1], [0]))
    i = gl.minimum(i, LINES * BLOCKS - 1)
    block = gl.minimum(first_block + i // LINES, scale_blocks - 1)
    first = first_row * EACH + i % LINES * IN_LINE
    at = SCALES + block * (N * EACH) + gl.minimum(first, N * EACH - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [at.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def of_rows(
    SCALES, n, first_block, N, scale_blocks, BLOCKS: gl.constexpr, EACH: gl.constexpr,
    ROW_GROUP: gl.constexpr,
):  # fmt: skip
    """Those of rows n and of BLOCKS blocks of columns.

    n, first_block  [HEIGHT] in columns_layout(BLOCKS * EACH, EACH)
    """
    layout: gl.constexpr = columns_layout(BLOCKS * EACH, EACH)
    c = gl.arange(0, BLOCKS * EACH, gl.SliceLayout(0, layout))[None, :]
    block = gl.minimum(first_block[:, None] + c // EACH, scale_blocks - 1)
    if ROW_GROUP > 1:
        at = n[:, None] // ROW_GROUP * scale_blocks + block
    else:
        at = (block * N + n[:, None]) * EACH + c % EACH
    return gl.load(SCALES + at)


@gluon.jit
def of_step(scales, i: gl.constexpr):
    """Those of a step [rows]; bytes are int32 if four were loaded as one."""
    packed: gl.constexpr = scales.dtype == gl.int32
    place: gl.constexpr = i // 4 if packed else i
    one = take(scales.reshape([scales.shape[0], scales.shape[1], 1]), place)
    one = one.reshape([scales.shape[0]])
    if packed:
        one = (one >> (i % 4 * 8)) & 0xFF
    return one


@gluon.jit
def as_float(scale):
    """Scales of any type, of which one of 8 bits is the exponent of a power of two."""
    if (scale.dtype == gl.uint8) | (scale.dtype == gl.int32):
        scale = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return scale.to(gl.float32)


@gluon.jit
def add_scaled(acc, product, scales, i: gl.constexpr):
    """acc + the products of step i times their scale."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    scale = gl.convert_layout(of_step(scales, i), layout, assert_trivial=True)
    return acc + product * as_float(scale)[:, None]


@gluon.jit
def zero_points(zeros, i: gl.constexpr, words, DTYPE: gl.constexpr, BITS: gl.constexpr):
    """Of a step: [rows, 1, 1]."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
    zero = gl.convert_layout(of_step(zeros, i), layout, assert_trivial=True).to(gl.int32)
    if DTYPE == "fp16":
        zero = zero * 0x10001 + 0x64006400
    else:
        if BITS == 4:
            exact = (zero.to(gl.float32) * (-1 / 64)).to(gl.bfloat16)
        else:  # below the exponent of 256, whose ulp is 2, not all fit
            exact = (zero - 128).to(gl.float32).to(gl.bfloat16)
        zero = (exact.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    return zero[:, None, None]


@gluon.jit
def multipliers(scales, i: gl.constexpr, DTYPE: gl.constexpr, EACH: gl.constexpr):
    """Factors of block i of 128 columns: EACH (1 or 2) of each of its 4 words, [rows, 4] int32.

    Both are the same if EACH is 1: the scale of 32 columns, whose code is an exponent.  Of two
    scales of 16 columns each has E5M3 bits (packed_weight.py).
    """
    ROWS: gl.constexpr = scales.shape[0]
    four = take(scales.reshape([ROWS, scales.shape[1] // EACH, EACH]), i)
    if EACH == 1:
        even, odd = four, four >> 8  # bytes 0 and 2; 1 and 3
        pairs = gl.join(gl.join(even, odd), gl.join(even >> 16, odd >> 16))
        codes = pairs.permute((0, 1, 3, 2)).reshape([ROWS, 4]) & 0xFF
        first = codes * 0x800080 + 0x35803580  # 107 more, in the exponent of bf16
        second = first
    else:
        two = gl.join(four, four >> 16).reshape([ROWS, 4])
        first, second = two & 0xFF, (two >> 8) & 0xFF
        if DTYPE == "fp16":
            first, second = first * 0x800080, second * 0x800080
        else:
            first, second = first * 0x100010 + 0x70007000, second * 0x100010 + 0x70007000
    return first, second
