"""Packed codes to wgmma's operand A, in Gluon: no value leaves its thread.

    load_chunk   words of shared memory in registers
    step_words   those of a step's columns
    to_weights   words -> weights [rows, columns], bf16 or fp16, where operand A of wgmma, or of
                 mma.sync, has them

A chunk is 64 rows of 32 words, the widest swizzle.  A thread has rows r and r + 8 of it, and of
each row the words 4 t .. 4 t + 3 of every block (packed_weight.py); so it has the columns that it
has of wgmma's operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNK_WORDS = gl.constexpr(32)


@gluon.constexpr_function
def words_layout() -> gl.DistributedLinearLayout:
    """[64, CHUNK_WORDS]: a thread's four words of a block lie together in its registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.constexpr_function
def columns_layout(columns: int, together: int) -> gl.DistributedLinearLayout:
    """[64, columns] of scales or zero points in the threads that have the rows of operand A."""
    bits = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    vector = together.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[*bits[:vector], [8, 0], *bits[vector:]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def log2(n: int) -> int:
    return n.bit_length() - 1


@gluon.jit
def take(x, i: gl.constexpr):
    """x [rows, n, m] -> x[:, i]; registers only, n a power of two."""
    LEVELS: gl.constexpr = log2(x.shape[1])
    for level in gl.static_range(LEVELS):
        halves = x.reshape([x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
        low, high = gl.split(halves.permute((0, 2, 3, 1)))
        if (i >> (LEVELS - 1 - level)) % 2 == 1:  # noqa: SIM108
            x = high
        else:
            x = low
    return x.reshape([x.shape[0], x.shape[2]])


@gluon.jit
def load_chunk(words, i: gl.constexpr):
    """Chunk i of words in shared memory [64, words], by 16-byte loads."""
    return words.slice(i * CHUNK_WORDS, CHUNK_WORDS, 1).load(words_layout())


@gluon.jit
def step_words(words, i: gl.constexpr, BITS: gl.constexpr, STEP: gl.constexpr):
    """words [rows, of blocks] -> those of STEP columns: [rows, 4 (t), words of a thread's row]."""
    BLOCKS: gl.constexpr = words.shape[1] // 16
    EACH: gl.constexpr = STEP * BITS // 128
    STEPS: gl.constexpr = 4 * BLOCKS // EACH
    ROWS: gl.constexpr = words.shape[0]
    ordered = words.reshape([ROWS, BLOCKS, 4, 4]).permute((0, 1, 3, 2))  # row, block, u, t
    step = take(ordered.reshape([ROWS, STEPS, EACH * 4]), i)
    return step.reshape([ROWS, EACH, 4]).permute((0, 2, 1))


@gluon.jit
def _joined(words, first, second, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, BITS: gl.constexpr):
    """-> int16 [rows, words, pair (of 4 bits: high, low bit of it), 4 (t), 2 (half)]."""
    if second is not None:
        args = (words, first, second)
    elif first is not None:
        args = (words, first)
    else:
        args = (words,)
    if BITS == 4:
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS, args, is_pure=True, pack=1,
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        )  # fmt: skip
        pairs = gl.join(gl.join(a, c), gl.join(b, d)).permute((0, 2, 3, 4, 1))
        return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS, args, is_pure=True, pack=1,
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
        )  # fmt: skip
        return gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 2, 4, 1, 3))


@gluon.jit
def to_weights(
    words, first, second, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """Words of step_words -> weights [rows, columns].

    first, second  what the conversion needs of each word, as 32 bits, or None
    """
    COLUMNS: gl.constexpr = words.shape[2] * 128 // BITS
    weights = _joined(words, first, second, PTX, CONSTRAINTS, BITS)
    weights = weights.reshape([words.shape[0], COLUMNS])
    if DTYPE == "bf16":
        return weights.to(gl.bfloat16, bitcast=True)
    else:
        return weights.to(gl.float16, bitcast=True)
