# prompt_inputs: queries, keys, values and gates of prompts: convolution, silu, L2 norm.
#   grid      (programs, Hv / HEADS + 2 * Hk * Dk / KEYS + Hv * Dv / VALUES): a program has chunks
#             of the gates of so many heads, or of so many channels, of whole heads
#   reads     qkv at the chunk's tokens and the K - 1 before them; of a row's slot the last inputs
#             of the convolution, at the first tokens of a row that continues; the convolution's
#             weight; b, a; a_log, dt_bias
#   writes    queries / sqrt(Dk) and keys [2, T, Hk, Dk], values [T, Hv, Dv], of the type of qkv;
#             gates [chunks, Hv, 4, CHUNK] float32, with G the sum of g since the chunk's beginning
#             and G' the last one: exp(G), exp(G' - G), G log2(e), beta; after the last token there
#             is no decay, and the second and the last one are zero
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
from model_zoo.layers.delta_net.convolution import (
    LOG2_E,
    input_before,
    log_decay,
    silu,
    step_size,
    weight_before,
)
from model_zoo.layers.delta_net.reference import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def _input(QKV, token, last, channel, qkv_row):
    source = QKV + token.to(tl.int64) * qkv_row + channel
    return tl.load(source, mask=token < last, other=0.0).to(tl.float32)


@triton.jit
def _store(
    OUT, y, token, last, channel, scale, row: tl.constexpr, DIM: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """y [C], the convolution's output at `token`: values, or vectors that become unit ones."""
    HEADS: tl.constexpr = y.shape[0] // DIM
    if not IS_VALUE:
        y = tl.reshape(y, (HEADS, DIM))
        y = y * (tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS) * scale)[:, None]
        y = tl.reshape(y, (HEADS * DIM,))
    at = OUT + token.to(tl.int64) * row + channel
    tl.store(at, y.to(OUT.dtype.element_ty), mask=token < last)


@triton.jit
def _channels(
    QKV, WEIGHT, CONV, OUT, first, last, begin, start, has_slot, channel, to, scale,
    qkv_row, tap_channel, tap, row: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr,
    CONV_DIM: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """A chunk of `channel` [C] of qkv, which are `to` of OUT."""
    w3 = weight_before(WEIGHT, 3, channel, tap_channel, tap, K)
    w2 = weight_before(WEIGHT, 2, channel, tap_channel, tap, K)
    w1 = weight_before(WEIGHT, 1, channel, tap_channel, tap, K)
    w0 = weight_before(WEIGHT, 0, channel, tap_channel, tap, K)
    x3 = input_before(
        QKV, CONV, 3, first, begin, start, has_slot, channel, qkv_row, K, CONV_DIM
    ).to(tl.float32)
    x2 = input_before(
        QKV, CONV, 2, first, begin, start, has_slot, channel, qkv_row, K, CONV_DIM
    ).to(tl.float32)
    x1 = input_before(
        QKV, CONV, 1, first, begin, start, has_slot, channel, qkv_row, K, CONV_DIM
    ).to(tl.float32)
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
        _store(OUT, y, token, last, to, scale, row, DIM, IS_VALUE)
        y = silu(w3 * x2 + w2 * x1 + w1 * a + w0 * b)
        _store(OUT, y, token + 1, last, to, scale, row, DIM, IS_VALUE)
        y = silu(w3 * x1 + w2 * a + w1 * b + w0 * c)
        _store(OUT, y, token + 2, last, to, scale, row, DIM, IS_VALUE)
        y = silu(w3 * a + w2 * b + w1 * c + w0 * d)
        _store(OUT, y, token + 3, last, to, scale, row, DIM, IS_VALUE)
        x3, x2, x1 = b, c, d
        a, b, c, d = next_a, next_b, next_c, next_d


@triton.jit
def _gates(
    B, A, A_LOG, DT_BIAS, GATES, first, last, index, head, b_row, a_row, HV: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The gates of a chunk for `head` [H]."""
    token, head = (first + tl.arange(0, CHUNK))[:, None], head[None, :]
    known = head < HV
    real = (token < last) & known
    at = token.to(tl.int64)
    beta = step_size(tl.load(B + at * b_row + head, mask=real, other=0.0))
    a = tl.load(A + at * a_row + head, mask=real, other=0.0)
    a_log = tl.load(A_LOG + head, mask=known, other=0.0)
    g = log_decay(a, a_log, tl.load(DT_BIAS + head, mask=known, other=0.0)) * LOG2_E
    g = tl.where(real, g, 0.0)
    since_begin = tl.cumsum(g, 0)
    left = tl.exp2(tl.sum(g, 0)[None, :] - since_begin)
    gate = GATES + (index * HV + head) * (4 * CHUNK) + tl.arange(0, CHUNK)[:, None]
    tl.store(gate, tl.exp2(since_begin), mask=known)
    tl.store(gate + CHUNK, tl.where(real, left, 0.0), mask=known)
    tl.store(gate + 2 * CHUNK, since_begin, mask=known)
    tl.store(gate + 3 * CHUNK, tl.where(real, beta, 0.0), mask=known)


@triton.jit(do_not_specialize=["tokens"])
def _prompt_inputs(
    QKV, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, CONV, CU_SEQLENS, LENGTHS, SLOTS, CHUNKS, COUNTS, QK, V,
    GATES, tokens, qkv_row, b_row, a_row, tap_channel, tap, conv_slot, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    GATE_BLOCKS: tl.constexpr = (HV + HEADS - 1) // HEADS
    KEY_BLOCKS: tl.constexpr = 2 * HK * DK // KEYS
    CONV_DIM: tl.constexpr = 2 * HK * DK + HV * DV
    block = tl.program_id(1) - GATE_BLOCKS
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0), disable_licm=True):
        first, last, begin, start, has_slot, conv = chunk_of(
            CHUNKS, CU_SEQLENS, LENGTHS, SLOTS, CONV, index, conv_slot
        )
        if block < 0:
            head = (block + GATE_BLOCKS) * HEADS + tl.arange(0, HEADS)
            _gates(B, A, A_LOG, DT_BIAS, GATES, first, last, index, head, b_row, a_row, HV, CHUNK)
        elif block < KEY_BLOCKS:
            key = block * KEYS + tl.arange(0, KEYS)
            is_key = block >= KEY_BLOCKS // 2
            out = QK + is_key.to(tl.int64) * tokens * (HK * DK)
            of_key = (block % (KEY_BLOCKS // 2)) * KEYS + tl.arange(0, KEYS)
            scale = tl.where(is_key, 1.0, DK**-0.5)
            _channels(
                QKV, CONV_WEIGHT, conv, out, first, last, begin, start, has_slot, key, of_key,
                scale, qkv_row, tap_channel, tap, HK * DK, DK, K, CONV_DIM, False,
            )  # fmt: skip
        else:
            value = (block - KEY_BLOCKS) * VALUES + tl.arange(0, VALUES)
            _channels(
                QKV, CONV_WEIGHT, conv, V, first, last, begin, start, has_slot,
                2 * HK * DK + value, value, 1.0, qkv_row, tap_channel, tap, HV * DV, DV, K,
                CONV_DIM, True,
            )  # fmt: skip
