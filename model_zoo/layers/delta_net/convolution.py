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
    QKV, CONV, BACK: tl.constexpr, token, begin, start, has_slot, channel, qkv_row, K: tl.constexpr,
    CONV_DIM: tl.constexpr,
):  # fmt: skip
    """The convolution's input of `channel` [C], BACK tokens before the scalar `token`, wherever it
    is: of the row, which begins at token `begin` and position `start` of the sequence, or of the
    sequence's slot CONV.  Zero before the sequence, and where the convolution does not reach.  No
    branch: all loads can be in flight."""
    if BACK >= K:
        return tl.zeros(channel.shape, QKV.dtype.element_ty)
    return _kept_before(
        QKV, CONV, BACK, token, begin, start, has_slot, channel, qkv_row, K, CONV_DIM
    )


@triton.jit
def _kept_before(
    QKV, CONV, BACK: tl.constexpr, token, begin, start, has_slot, channel, qkv_row, K: tl.constexpr,
    CONV_DIM: tl.constexpr,
):  # fmt: skip
    """input_before, also of the input that no convolution after the token reaches: BACK = K."""
    at = token - BACK
    new = tl.load(QKV + at.to(tl.int64) * qkv_row + channel, mask=at >= begin, other=0.0)
    if BACK == 0:
        return new
    position = start + at - begin
    is_old = (at < begin) & (position >= 0) & has_slot
    old = tl.load(CONV + position % K * CONV_DIM + channel, mask=is_old, other=0.0)
    return tl.where(at >= begin, new, old)


@triton.jit
def weight_before(WEIGHT, BACK: tl.constexpr, channel, tap_channel, tap, K: tl.constexpr):
    """The weight of the input BACK tokens before."""
    if BACK >= K:
        return tl.zeros(channel.shape, tl.float32)
    return tl.load(WEIGHT + channel * tap_channel + (K - 1 - BACK) * tap).to(tl.float32)


@triton.jit
def store_last_inputs(
    CONV, x3, x2, x1, x0, position, n, channel, K: tl.constexpr, CONV_DIM: tl.constexpr
):
    """To a slot: those of the last n inputs that it keeps, x0 of `position`, x1 to x3 of those
    before it.  Each takes the place of the one K before it."""
    tl.store(CONV + position % K * CONV_DIM + channel, x0)
    if (K > 1) and (n > 1):
        tl.store(CONV + (position - 1) % K * CONV_DIM + channel, x1)
    if (K > 2) and (n > 2):
        tl.store(CONV + (position - 2) % K * CONV_DIM + channel, x2)
    if (K > 3) and (n > 3):
        tl.store(CONV + (position - 3) % K * CONV_DIM + channel, x3)


@triton.jit
def copy_inputs(
    QKV, CONV, TARGET, end, begin, start, has_slot, channel, qkv_row, K: tl.constexpr,
    CONV_DIM: tl.constexpr,
):  # fmt: skip
    """The last inputs of `channel` before token `end` to the slot TARGET."""
    for back in tl.static_range(1, K + 1):
        x = _kept_before(
            QKV, CONV, back, end, begin, start, has_slot, channel, qkv_row, K, CONV_DIM
        )
        position = start + end - back - begin
        if position >= 0:
            tl.store(TARGET + position % K * CONV_DIM + channel, x)


@triton.jit
def copy_inputs_of_head(
    QKV, CONV, TARGET, end, begin, start, has_slot, head, qkv_row, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """copy_inputs of a value head, and of its key head if it is the first one of that."""
    CONV_DIM: tl.constexpr = 2 * HK * DK + HV * DV
    value = 2 * HK * DK + head * DV + tl.arange(0, DV)
    copy_inputs(QKV, CONV, TARGET, end, begin, start, has_slot, value, qkv_row, K, CONV_DIM)
    if head % (HV // HK) == 0:
        for first in tl.static_range(2):
            key = first * HK * DK + head // (HV // HK) * DK + tl.arange(0, DK)
            copy_inputs(QKV, CONV, TARGET, end, begin, start, has_slot, key, qkv_row, K, CONV_DIM)


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
