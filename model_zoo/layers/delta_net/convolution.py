"""What the kernels share: the convolution, and the gates, of any tile of tokens and channels."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)): a square of a reciprocal root, since a division is eight instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return x * root * root


@triton.jit
def input_before(
    QKV, CONV, BACK: tl.constexpr, token, begin, channel, continued, qkv_row, K: tl.constexpr
):
    """The convolution's input of `channel` [C], BACK tokens before the scalar `token`, wherever it
    is: of the row, which begins at `begin`, or of the sequence's slot CONV.  Zero before the
    sequence, and where the convolution does not reach.  No branch: all loads can be in flight."""
    if BACK >= K:
        return tl.zeros(channel.shape, QKV.dtype.element_ty)
    at = token - BACK
    new = tl.load(QKV + at.to(tl.int64) * qkv_row + channel, mask=at >= begin, other=0.0)
    if BACK == 0:
        return new
    is_old = (at < begin) & continued
    old = tl.load(CONV + channel * (K - 1) + (at - begin + (K - 1)), mask=is_old, other=0.0)
    return tl.where(at >= begin, new, old)


@triton.jit
def weight_before(WEIGHT, BACK: tl.constexpr, channel, tap_channel, tap, K: tl.constexpr):
    """The weight of the input BACK tokens before."""
    if BACK >= K:
        return tl.zeros(channel.shape, tl.float32)
    return tl.load(WEIGHT + channel * tap_channel + (K - 1 - BACK) * tap).to(tl.float32)


@triton.jit
def store_last_inputs(CONV, x2, x1, x0, channel, K: tl.constexpr):
    """To a slot: the last K - 1 inputs, of which x0 is the newest."""
    at = CONV + channel * (K - 1) + (K - 2)
    if K > 1:
        tl.store(at, x0)
    if K > 2:
        tl.store(at - 1, x1)
    if K > 3:
        tl.store(at - 2, x2)


@triton.jit
def last_inputs(
    QKV, CONV, end, begin, channel, continued, qkv_row, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """[channels, COLUMNS]: the last K - 1 inputs of `channel` before token `end`, oldest first."""
    at = tl.arange(0, COLUMNS)[None, :] + (end - (K - 1))
    real = tl.arange(0, COLUMNS)[None, :] < K - 1
    channel = channel[:, None]
    is_new = (at >= begin) & real
    new = tl.load(QKV + at.to(tl.int64) * qkv_row + channel, mask=is_new, other=0.0)
    is_old = (at < begin) & real & continued
    old = tl.load(CONV + channel * (K - 1) + (at - begin + (K - 1)), mask=is_old, other=0.0)
    return tl.where(at >= begin, new, old)


@triton.jit
def store_inputs(CONV, inputs, channel, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store what last_inputs returned in a slot."""
    column = tl.arange(0, COLUMNS)[None, :]
    at = CONV + channel[:, None] * (K - 1) + column
    tl.store(at, inputs, mask=column < K - 1)


@triton.jit
def copy_inputs(
    QKV, CONV, TARGET, end, begin, continued, head, part, qkv_row, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last inputs before token `end` to the slot TARGET: those of BLOCK_V columns of a value
    head, and those of its key head if the part is the first one of that."""
    value = 2 * HK * DK + head * DV + part * BLOCK_V + tl.arange(0, BLOCK_V)
    inputs = last_inputs(QKV, CONV, end, begin, value, continued, qkv_row, K, COLUMNS)
    store_inputs(TARGET, inputs, value, K, COLUMNS)
    if (head % (HV // HK) == 0) & (part == 0):
        for first in tl.static_range(2):
            key = first * HK * DK + head // (HV // HK) * DK + tl.arange(0, DK)
            shared = last_inputs(QKV, CONV, end, begin, key, continued, qkv_row, K, COLUMNS)
            store_inputs(TARGET, shared, key, K, COLUMNS)


@triton.jit
def step_size(B):
    """beta of b, in float32."""
    return 1.0 / (1.0 + tl.exp(-B.to(tl.float32)))


@triton.jit
def log_decay(A, a_log, dt_bias):
    """g of a, in float32: -exp(A_log) softplus(a + dt_bias)."""
    x = A.to(tl.float32) + dt_bias.to(tl.float32)
    small = tl.minimum(x, 20.0, tl.PropagateNan.ALL)  # exp of more may be infinite
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(small)))
    return -tl.exp(a_log.to(tl.float32)) * softplus
