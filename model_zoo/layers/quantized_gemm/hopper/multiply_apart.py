"""Products of few rows of x and 4-bit weights by warps with columns of their own, in Gluon.

Each of four warps has all rows of W of a tile and a quarter of a unit's columns, so that it loads
only these of x, for products of its own with all rows; the warps' sums meet at the end of a tile.

    unit_quads      a unit's scales or zero points, loaded for four rows at once
    multiply_apart  sums [4, rows of W, rows of x], a warp's after the other, + a unit's product
    add_warps       the sum of the warps' sums

A thread has four consecutive rows of W for each 32, whose scales lie together.  Rows of products
are in another order: bits 1 and 0 of a row of W are bits 4 and 3 there.  Rows that a warp's loads
read from shared memory at the same time are four apart, where their words are in other banks.

Codes of int4 are multiplied as they are (RAW): their bits are a subnormal number, which tensor
cores take as any other, and x is multiplied by a power of two for it (conversions.py).  The sums of
x over a scale's columns, which one more product has for all rows of W, times the zero point are
taken off:
    sum (code - zero) x = sum code x - zero sum x
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from model_zoo.layers.gemm.hopper.gate import tile_row
from model_zoo.layers.quantized_gemm.conversions import RAW_X
from model_zoo.layers.quantized_gemm.hopper.convert import log2, take
from model_zoo.layers.quantized_gemm.hopper.multiply import (
    columns_of_sums,
    converted,
)
from model_zoo.layers.quantized_gemm.hopper.scales import as_float, elements, of_step

WARPS = gl.constexpr(4)
BLOCK_WORDS = gl.constexpr(16)  # of 128 columns
CHUNK_COLUMNS = gl.constexpr(512)  # a block for each warp
MIDDLE = gl.constexpr(8)  # the zero point where there are no zero points
RAISED, RAISED_LESS = (gl.constexpr(factor) for factor in RAW_X)
STEP = gl.constexpr(32)  # columns of a word of a row and four threads


@gluon.constexpr_function
def _upper(first: int, bits: int, place: int, rank: int) -> list[list[int]]:
    """Bases of a layout for `bits` bits of the index in one place, from the value `first` on."""
    return [[(first << i) * (at == place) for at in range(rank)] for i in range(bits)]


@gluon.constexpr_function
def _words_layout(height: int) -> gl.DistributedLinearLayout:
    """Of words [height, 64]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], *_upper(32, log2(height // 32), 0, 2)],
        lane_bases=[[0, 4], [0, 8], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[height, 64],
    )


@gluon.constexpr_function
def _x_layout(width: int) -> gl.DistributedLinearLayout:
    """Of x [width, CHUNK_COLUMNS], as operand B."""
    return gl.DistributedLinearLayout(
        reg_bases=[*_upper(1, 1, 1, 2), *_upper(8, 4, 1, 2), *_upper(8, log2(width // 8), 0, 2)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 128], [0, 256]],
        block_bases=[],
        shape=[width, 512],
    )


@gluon.constexpr_function
def _quads_layout(blocks: int, quads: int, together: int) -> gl.DistributedLinearLayout:
    """Of scales [blocks, quads, together]: the rows' scales of a quad and block lie together."""
    of_quads, of_chunks = _upper(8, log2(quads // 8), 1, 3), _upper(4, log2(blocks // 4), 0, 3)
    return gl.DistributedLinearLayout(
        reg_bases=[*_upper(1, log2(together), 2, 3), *of_quads, *of_chunks],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[blocks, quads, together],
    )


@gluon.constexpr_function
def _gathered_layout(height: int, width: int) -> gl.BlockedLayout:
    """Of sums [4, height, width]: a thread has all warps' for some rows of x."""
    warps = height // 32
    each = max(1, height * width // 128)
    return gl.BlockedLayout([4, 1, each], [1, 32, 1], [1, warps, 4 // warps], [2, 1, 0])


@gluon.constexpr_function
def whole_layout(height: int, width: int) -> gl.SliceLayout:
    """Of what add_warps() returns."""
    return gl.SliceLayout(0, _gathered_layout(height, width))


@gluon.jit
def unit_quads(
    SCALES, tile, unit_block, N, scale_blocks, BLOCKS: gl.constexpr, HEIGHT: gl.constexpr,
    PER_BLOCK: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Scales, or zero points, of a tile's rows and BLOCKS blocks of columns from unit_block on.

    -> [BLOCKS, quads, 4 * elements of a row]; N a multiple of 4, with GATED of 8
    """
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    QUADS: gl.constexpr = HEIGHT // 4
    layout: gl.constexpr = _quads_layout(BLOCKS, QUADS, 4 * EACH)
    of_blocks: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_quads: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    within: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    quads = N // 4
    q = tile_row(tile, gl.arange(0, QUADS, of_quads), quads, QUADS, GATED)
    q = gl.minimum(q, quads - 1)
    block = gl.minimum(unit_block + gl.arange(0, BLOCKS, of_blocks), scale_blocks - 1)
    first = (block * quads)[:, None, None] + q[None, :, None]
    return gl.load(SCALES + (first * (4 * EACH) + gl.arange(0, 4 * EACH, within)[None, None, :]))


@gluon.jit
def _chunk_scales(scales, i: gl.constexpr, HEIGHT: gl.constexpr):
    """Those of chunk i: [WARPS * HEIGHT, elements of a row], rows in the order of products."""
    CHUNKS: gl.constexpr = scales.shape[0] // WARPS
    EACH: gl.constexpr = scales.shape[2] // 4
    chunk = take(scales.reshape([1, CHUNKS, WARPS * HEIGHT * EACH]), i)
    rows = chunk.reshape([WARPS, HEIGHT // 32, 8, 2, 2, EACH]).permute((0, 1, 3, 4, 2, 5))
    return rows.reshape([WARPS * HEIGHT, EACH])


@gluon.jit
def _chunk_words(words, i: gl.constexpr):
    """Chunk i of words in shared memory: [WARPS * HEIGHT, BLOCK_WORDS], as _chunk_scales."""
    HEIGHT: gl.constexpr = words.shape[0]
    chunk = words.slice(i * WARPS * BLOCK_WORDS, WARPS * BLOCK_WORDS, 1).load(_words_layout(HEIGHT))
    rows = chunk.reshape([HEIGHT // 32, 8, 2, 2, WARPS, BLOCK_WORDS]).permute((4, 0, 2, 3, 1, 5))
    return rows.reshape([WARPS * HEIGHT, BLOCK_WORDS])


@gluon.jit
def _step_of_x(x, i: gl.constexpr, LAYOUT: gl.constexpr):
    """x [width, CHUNK_COLUMNS] -> each warp's columns of step i [WARPS, STEP, width], operand B."""
    WIDTH: gl.constexpr = x.shape[0]
    step = take(x.reshape([WIDTH * WARPS, CHUNK_COLUMNS // WARPS // STEP, STEP]), i)
    step = step.reshape([WIDTH, WARPS, STEP]).permute((1, 2, 0))
    return gl.convert_layout(step, gl.DotOperandLayout(1, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _raised(x):
    """x [width, columns] for raw codes, of which the second eight of 16 are larger numbers."""
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    factor = gl.where(columns // 8 % 2 == 0, RAISED, RAISED_LESS).to(gl.bfloat16)
    return x * factor[None, :]


@gluon.jit
def _taken_off(
    x, FIRST: gl.constexpr, STEPS: gl.constexpr, ZERO: gl.constexpr, HEIGHT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """-ZERO times the sums of x over STEPS steps, for each row of W: [WARPS, HEIGHT, width]."""
    WIDTH: gl.constexpr = x.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    columns = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, operand)))
    bits = gl.where(columns // 8 % 2 == 0, ZERO, ZERO << 4) - 32768  # as raw codes, and the sign
    bits = gl.zeros([WARPS, 16, STEP], gl.int32, operand) + bits[None, None, :]
    factor = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    none = gl.zeros([WARPS, 16, WIDTH], gl.float32, LAYOUT)
    sums0, sums1 = none, none  # in turn: their latency is that of several
    for i in gl.static_range(STEPS):
        if i % 2 == 0:
            sums0 = mma_v2(factor, _step_of_x(x, FIRST + i, LAYOUT), sums0)
        else:
            sums1 = mma_v2(factor, _step_of_x(x, FIRST + i, LAYOUT), sums1)
    sums = (sums0 + sums1).reshape([WARPS, 1, 16, WIDTH])
    for _ in gl.static_range(log2(HEIGHT // 16)):
        twice = gl.join(sums, sums).permute((0, 1, 4, 2, 3))
        sums = twice.reshape([WARPS, 2 * sums.shape[1], 16, WIDTH])
    return gl.convert_layout(sums.reshape([WARPS, HEIGHT, WIDTH]), LAYOUT, assert_trivial=True)


@gluon.jit
def _of_rows(values, i: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales or zero points of step i for sums: [WARPS, HEIGHT, 1]."""
    one = of_step(values, i).reshape([WARPS, HEIGHT])
    return gl.convert_layout(one, gl.SliceLayout(2, LAYOUT), assert_trivial=True)[:, :, None]


@gluon.jit
def _product(
    sums, chunk, x, scales, zeros, FIRST: gl.constexpr, STEPS: gl.constexpr, PTX: gl.constexpr,
    CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """sums + the products of STEPS steps of the chunk; scales, zeros: of conversions, or None."""
    layout: gl.constexpr = sums.type.layout
    HEIGHT: gl.constexpr = sums.shape[1]
    for i in gl.static_range(STEPS):
        a = converted(
            chunk, scales, zeros, FIRST + i, STEP, STEPS * STEP, PTX, CONSTRAINTS, DTYPE, BITS,
            FACTORS,
        )  # fmt: skip
        a = a.reshape([WARPS, HEIGHT, STEP])
        a = gl.convert_layout(a, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
        sums = mma_v2(a, _step_of_x(x, FIRST + i, layout), sums)
    return sums


@gluon.jit
def multiply_apart(
    acc, words, rows, scales, zeros, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
    RAW: gl.constexpr,
):  # fmt: skip
    """acc + a unit's product: words in shared memory [HEIGHT, words], rows [width, columns].

    acc            [WARPS, HEIGHT, width] in runs_layout(WARPS)
    scales, zeros  of the unit, as unit_quads() loads them, or None
    FACTORS        as conversions.py has them
    """
    SCALED: gl.constexpr = PER_BLOCK > 0 and FACTORS == 0
    STEPS: gl.constexpr = columns_of_sums(PER_BLOCK, FACTORS) // STEP
    HEIGHT: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    none = gl.zeros_like(acc)
    subtracted, factors = zeros, scales
    if RAW:
        subtracted = None  # after the products
    for j in gl.static_range(rows.shape[1] // CHUNK_COLUMNS):
        chunk = _chunk_words(words, j)
        columns = rows.slice(j * CHUNK_COLUMNS, CHUNK_COLUMNS, 1)
        x = columns.load(_x_layout(rows.shape[0]))
        if RAW:
            x = _raised(x)
        if scales is not None:
            factors = _chunk_scales(scales, j, HEIGHT)
        if zeros is not None:
            of_chunk = _chunk_scales(zeros, j, HEIGHT)
            if not RAW:
                subtracted = of_chunk
        for g in gl.static_range(CHUNK_COLUMNS // WARPS // STEP // STEPS):
            sums = none
            if RAW and zeros is None:
                sums = _taken_off(x, g * STEPS, STEPS, MIDDLE, HEIGHT, layout)
            sums = _product(
                sums, chunk, x, factors, subtracted, g * STEPS, STEPS, PTX, CONSTRAINTS, DTYPE,
                BITS, FACTORS,
            )  # fmt: skip
            if RAW and zeros is not None:
                zero = _of_rows(of_chunk, g, HEIGHT, layout).to(gl.float32)
                sums += _taken_off(x, g * STEPS, STEPS, 1, HEIGHT, layout) * zero
            if SCALED:
                sums *= as_float(_of_rows(factors, g, HEIGHT, layout))
            acc += sums
    return acc


@gluon.jit
def add_warps(acc):
    """Sums of the warps' products -> [HEIGHT, width] in whole_layout, rows in W's order."""
    HEIGHT: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = acc.shape[2]
    rows = acc.reshape([WARPS, HEIGHT // 32, 2, 2, 8, WIDTH]).permute((0, 1, 4, 2, 3, 5))
    rows = rows.reshape([WARPS, HEIGHT, WIDTH])
    return gl.sum(gl.convert_layout(rows, _gathered_layout(HEIGHT, WIDTH)), 0)
