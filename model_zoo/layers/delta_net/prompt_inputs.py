# prompt_inputs: queries, keys and values of prompts: convolution, silu, L2 norm, step sizes.
#   grid      (programs, 2 * Hk * Dk / KEYS + Hv * Dv / VALUES): a program has chunks of so many
#             channels, of whole heads
#   reads     qkv at the chunk's tokens and the K - 1 before them; of a row's slot the last inputs
#             of the convolution, at the first tokens of a row that continues; the convolution's
#             weight; b
#   writes    queries / sqrt(Dk) and keys [2, T, Hk, Dk], beta * values [T, Hv, Dv], of the type of
#             qkv
#   math      float32.  Tokens come one after the other, so that each input is read once; those of
#             the next four are on their way meanwhile
#   launch    waits before it launches dependents, as all kernels of prompts do
#   bound     memory: 4 * T * (2 * Hk * Dk + Hv * Dv) bytes
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.chunk_plan import chunk_of
from model_zoo.layers.delta_net.convolution import input_before, silu, step_size, weight_before
from model_zoo.layers.delta_net.reference import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def _input(QKV, token, last, channel, qkv_row):
    source = QKV + token.to(tl.int64) * qkv_row + channel
    return tl.load(source, mask=token < last, other=0.0).to(tl.float32)


@triton.jit
def _store(
    OUT, B, y, token, last, channel, head, scale, b_row, row: tl.constexpr, DIM: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """y [C], the convolution's output at `token`: a value times beta, or a unit vector."""
    real = token < last
    at = token.to(tl.int64)
    HEADS: tl.constexpr = y.shape[0] // DIM
    y = tl.reshape(y, (HEADS, DIM))
    if IS_VALUE:
        b = tl.load(B + at * b_row + head + tl.arange(0, HEADS), mask=real, other=0.0)
        factor = step_size(b)
    else:
        factor = tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS) * scale
    y = tl.reshape(y * factor[:, None], (HEADS * DIM,))
    tl.store(OUT + at * row + channel, y.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _channels(
    QKV, B, WEIGHT, CONV, OUT, first, last, begin, continued, channel, to, head, scale, qkv_row,
    b_row, tap_channel, tap, row: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """A chunk of `channel` [C] of qkv, which are `to` of OUT."""
    w3 = weight_before(WEIGHT, 3, channel, tap_channel, tap, K)
    w2 = weight_before(WEIGHT, 2, channel, tap_channel, tap, K)
    w1 = weight_before(WEIGHT, 1, channel, tap_channel, tap, K)
    w0 = weight_before(WEIGHT, 0, channel, tap_channel, tap, K)
    x3 = input_before(QKV, CONV, 3, first, begin, channel, continued, qkv_row, K).to(tl.float32)
    x2 = input_before(QKV, CONV, 2, first, begin, channel, continued, qkv_row, K).to(tl.float32)
    x1 = input_before(QKV, CONV, 1, first, begin, channel, continued, qkv_row, K).to(tl.float32)
    a = _input(QKV, first, last, channel, qkv_row)
    b = _input(QKV, first + 1, last, channel, qkv_row)
    c = _input(QKV, first + 2, last, channel, qkv_row)
    d = _input(QKV, first + 3, last, channel, qkv_row)
    for i in tl.range(0, last - first, 4):
        token = first + i
        next_a = _input(QKV, token + 4, last, channel, qkv_row)
        next_b = _input(QKV, token + 5, last, channel, qkv_row)
        next_c = _input(QKV, token + 6, last, channel, qkv_row)
        next_d = _input(QKV, token + 7, last, channel, qkv_row)
        y = silu(w3 * x3 + w2 * x2 + w1 * x1 + w0 * a)
        _store(OUT, B, y, token, last, to, head, scale, b_row, row, DIM, IS_VALUE)
        y = silu(w3 * x2 + w2 * x1 + w1 * a + w0 * b)
        _store(OUT, B, y, token + 1, last, to, head, scale, b_row, row, DIM, IS_VALUE)
        y = silu(w3 * x1 + w2 * a + w1 * b + w0 * c)
        _store(OUT, B, y, token + 2, last, to, head, scale, b_row, row, DIM, IS_VALUE)
        y = silu(w3 * a + w2 * b + w1 * c + w0 * d)
        _store(OUT, B, y, token + 3, last, to, head, scale, b_row, row, DIM, IS_VALUE)
        x3, x2, x1 = b, c, d
        a, b, c, d = next_a, next_b, next_c, next_d


@triton.jit(do_not_specialize=["tokens"])
def _prompt_inputs(
    QKV, B, CONV_WEIGHT, CONV, CU_SEQLENS, LENGTHS, SLOTS, CHUNKS, COUNTS, QK, V, tokens, qkv_row,
    b_row, tap_channel, tap, conv_slot, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    KEY_BLOCKS: tl.constexpr = 2 * HK * DK // KEYS
    block = tl.program_id(1)
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0), disable_licm=True):
        first, last, begin, continued, conv = chunk_of(
            CHUNKS, CU_SEQLENS, LENGTHS, SLOTS, CONV, index, conv_slot
        )
        if block < KEY_BLOCKS:
            key = block * KEYS + tl.arange(0, KEYS)
            is_key = block >= KEY_BLOCKS // 2
            out = QK + is_key.to(tl.int64) * tokens * (HK * DK)
            of_key = (block % (KEY_BLOCKS // 2)) * KEYS + tl.arange(0, KEYS)
            scale = tl.where(is_key, 1.0, DK**-0.5)
            _channels(
                QKV, B, CONV_WEIGHT, conv, out, first, last, begin, continued, key, of_key, 0,
                scale, qkv_row, b_row, tap_channel, tap, HK * DK, DK, K, False,
            )  # fmt: skip
        else:
            value = (block - KEY_BLOCKS) * VALUES + tl.arange(0, VALUES)
            head = (block - KEY_BLOCKS) * (VALUES // DV)
            _channels(
                QKV, B, CONV_WEIGHT, conv, V, first, last, begin, continued, 2 * HK * DK + value,
                value, head, 1.0, qkv_row, b_row, tap_channel, tap, HV * DV, DV, K, True,
            )  # fmt: skip
