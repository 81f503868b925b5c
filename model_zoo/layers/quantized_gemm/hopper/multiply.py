"""Products of a unit of packed weights and rows of x, both in shared memory, in Gluon.

By wgmma, or where rows are few by mma.sync.  A wgmma of 16 columns takes as long for few rows of x
as for 64, in which its warp does not convert; mma.sync takes what its rows ask for, beside
conversions, but each warp reads x from shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from model_zoo.layers.quantized_gemm.hopper.convert import (
    CHUNK_WORDS,
    load_chunk,
    step_words,
    take,
    to_weights,
)
from model_zoo.layers.quantized_gemm.hopper.scales import (
    SCALE_COLUMNS,
    add_scaled,
    multipliers,
    zero_points,
)


@gluon.constexpr_function
def sums_layout(width: int, sync: bool) -> gl.NVMMADistributedLayout:
    """Of sums [64, width]."""
    if sync:
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def runs_layout(fold: int) -> gl.NVMMADistributedLayout:
    """Of sums [fold, 64 / fold, width]: sums_layout's of mma.sync, whose warps are of one run."""
    return gl.NVMMADistributedLayout([2, 0], [fold, 4 // fold, 1], [1, 16, 8])


@gluon.constexpr_function
def runs_of_x_layout(fold: int, columns: int) -> gl.DistributedLinearLayout:
    """Of rows of x [fold * 8, columns]: each warp has those of its run, as operand B."""
    bits = columns.bit_length() - 1
    warps = [[0, 0], [8, 0]] if fold == 2 else [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 1 << i] for i in range(3, bits))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[fold * 8, columns],
    )


@gluon.constexpr_function
def columns_of_sums(per_block: int, factors: int) -> int:
    """Columns whose products have a sum of their own, or all of SCALE_COLUMNS."""
    scaled = per_block > 0 and factors == 0
    return SCALE_COLUMNS // per_block if scaled else SCALE_COLUMNS


@gluon.jit
def converted(
    chunk, scales, zeros, i: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr,
    PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr,
    FACTORS: gl.constexpr,
):  # fmt: skip
    """Weights [rows, STEP] of step i of those that scales and zeros are of, which is in the chunk.

    GROUP  columns of a scale's step
    """
    IN_CHUNK: gl.constexpr = chunk.shape[1] * 32 // BITS // STEP
    words = step_words(chunk, i % IN_CHUNK, BITS, STEP)
    first, second = None, None
    if FACTORS > 0:
        EACH: gl.constexpr = SCALE_COLUMNS // STEP  # steps of a block
        by_word: gl.constexpr = gl.SliceLayout(1, words.type.layout)
        first, second = multipliers(scales, i // EACH, DTYPE, FACTORS)
        ROWS: gl.constexpr = chunk.shape[0]
        first = take(first.reshape([ROWS, EACH, 4 // EACH]), i % EACH)
        second = take(second.reshape([ROWS, EACH, 4 // EACH]), i % EACH)
        first = gl.convert_layout(first, by_word, assert_trivial=True)[:, None, :]
        second = gl.convert_layout(second, by_word, assert_trivial=True)[:, None, :]
        if FACTORS == 1:
            second = None
    elif zeros is not None:
        first = zero_points(zeros, i * STEP // GROUP, words, DTYPE, BITS)
    return to_weights(words, first, second, PTX, CONSTRAINTS, DTYPE, BITS)


@gluon.jit
def _wait_and_add(acc, pending, scales, i: gl.constexpr, OUTSTANDING: gl.constexpr):
    product = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(pending,))
    return add_scaled(acc, product, scales, i)


@gluon.jit
def _multiply_async(
    acc, words, rows, scales, zeros, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """By wgmma: a step is converted while the one before is multiplied."""
    SCALED: gl.constexpr = PER_BLOCK > 0 and FACTORS == 0  # sums of products, by step
    STEP: gl.constexpr = columns_of_sums(PER_BLOCK, FACTORS)
    IN_CHUNK: gl.constexpr = CHUNK_WORDS * 32 // BITS // STEP
    STEPS: gl.constexpr = rows.shape[1] // STEP
    layout: gl.constexpr = acc.type.layout
    none = gl.zeros_like(acc)
    following = load_chunk(words, 0)
    for i in gl.static_range(STEPS):
        if i % IN_CHUNK == 0:
            chunk = following
        if (i % IN_CHUNK == IN_CHUNK - 1) & (i < STEPS - 1):
            # Asked for before a step is converted, which takes longer.
            following = load_chunk(words, (i + 1) // IN_CHUNK)
        a = converted(chunk, scales, zeros, i, STEP, STEP, PTX, CONSTRAINTS, DTYPE, BITS, FACTORS)
        a = gl.convert_layout(a, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
        b = rows.slice(i * STEP, STEP, 1).permute((1, 0))
        if SCALED:
            product = warpgroup_mma(a, b, none, use_acc=False, is_async=True)
            if i > 0:
                acc = _wait_and_add(acc, pending, scales, i - 1, 1)  # noqa: F821
            pending = product
        else:
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    if SCALED:
        acc = _wait_and_add(acc, pending, scales, STEPS - 1, 0)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc


@gluon.jit
def _mma(a, rows, sums, i: gl.constexpr, STEP: gl.constexpr):
    """sums [HEIGHT, width] + a [HEIGHT, STEP] times columns of step i of rows [width, *].

    Rows of fold x width: HEIGHT / fold rows of `a` after the other are multiplied with `width`
    rows of x after the other; width is 8 if fold > 1.
    """
    WIDTH: gl.constexpr = sums.shape[1]
    FOLD: gl.constexpr = rows.shape[0] // WIDTH
    layout: gl.constexpr = sums.type.layout
    columns = rows.slice(i * STEP, STEP, 1)
    if FOLD == 1:
        return mma_v2(a, columns.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2)), sums)
    else:
        of_runs: gl.constexpr = runs_layout(FOLD)
        HEIGHT: gl.constexpr = sums.shape[0] // FOLD
        x = columns.load(runs_of_x_layout(FOLD, STEP))
        x = x.reshape([FOLD, WIDTH, STEP]).permute((0, 2, 1))
        x = gl.convert_layout(x, gl.DotOperandLayout(1, of_runs, 2), assert_trivial=True)
        a = a.reshape([FOLD, HEIGHT, STEP])
        a = gl.convert_layout(a, gl.DotOperandLayout(0, of_runs, 2), assert_trivial=True)
        sums = sums.reshape([FOLD, HEIGHT, WIDTH])
        sums = mma_v2(a, x, gl.convert_layout(sums, of_runs, assert_trivial=True))
        sums = sums.reshape([FOLD * HEIGHT, WIDTH])
        return gl.convert_layout(sums, layout, assert_trivial=True)


@gluon.jit
def _multiply_sync(
    acc, words, rows, scales, zeros, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """By mma.sync, whose latency is that of several: sums of four steps in turn."""
    SCALED: gl.constexpr = PER_BLOCK > 0 and FACTORS == 0
    GROUP: gl.constexpr = columns_of_sums(PER_BLOCK, FACTORS)
    STEP: gl.constexpr = min(GROUP, 64) if SCALED else 32
    EACH: gl.constexpr = GROUP // STEP  # steps of a scale
    IN_CHUNK: gl.constexpr = CHUNK_WORDS * 32 // BITS // STEP
    STEPS: gl.constexpr = rows.shape[1] // STEP
    layout: gl.constexpr = acc.type.layout
    none = gl.zeros_like(acc)
    sums0, sums1, sums2, sums3 = acc, none, none, none
    following = load_chunk(words, 0)
    for i in gl.static_range(STEPS):
        if i % IN_CHUNK == 0:
            chunk = following
        if (i % IN_CHUNK == 0) & (i + IN_CHUNK < STEPS):
            following = load_chunk(words, i // IN_CHUNK + 1)
        a = converted(chunk, scales, zeros, i, STEP, GROUP, PTX, CONSTRAINTS, DTYPE, BITS, FACTORS)
        a = gl.convert_layout(a, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
        if SCALED:
            product = _mma(a, rows, none, i, STEP)
            if i % EACH > 0:
                product += sums1
            sums1 = product
            if i % EACH == EACH - 1:
                sums0 = add_scaled(sums0, product, scales, i // EACH)
        elif i % 4 == 0:
            sums0 = _mma(a, rows, sums0, i, STEP)
        elif i % 4 == 1:
            sums1 = _mma(a, rows, sums1, i, STEP)
        elif i % 4 == 2:
            sums2 = _mma(a, rows, sums2, i, STEP)
        else:
            sums3 = _mma(a, rows, sums3, i, STEP)
    return sums0 if SCALED else (sums0 + sums1) + (sums2 + sums3)


@gluon.jit
def multiply(
    acc, words, rows, scales, zeros, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr,
    SYNC: gl.constexpr,
):  # fmt: skip
    """acc + a unit's product: words in shared memory [HEIGHT, words], rows [WIDTH, columns].

    acc            [HEIGHT, WIDTH] in sums_layout; of mma.sync, if rows are of several column runs,
                   of those of its run alone
    scales, zeros  of the unit, as of_rows() loads them, or None
    FACTORS        as conversions.py has them
    """
    if SYNC:
        acc = _multiply_sync(
            acc, words, rows, scales, zeros, PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS
        )
    else:
        acc = _multiply_async(
            acc, words, rows, scales, zeros, PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK, FACTORS
        )
    return acc
