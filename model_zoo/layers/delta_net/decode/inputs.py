"""What kernel.py computes of a row before its states: queries, keys, values, gates."""

from __future__ import annotations

import triton
import triton.language as tl

from model_zoo.layers.delta_net.convolution import (
    copy_inputs,
    input_before,
    log_decay,
    silu,
    step_size,
    store_last_inputs,
    weight_before,
)
from model_zoo.layers.delta_net.reference import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def decode_row(CU_SEQLENS, LENGTHS, SLOTS, row, per_row, MAX_TOKENS: tl.constexpr):
    """-> (first token, one past the last; how many tokens the sequence has before; slot; where the
    inputs of the first token are).  Of rows of more than MAX_TOKENS the first two are equal: other
    kernels have them.

    per_row  tokens of a row for which there is room in inputs; 0: for all tokens
    """
    begin, end = tl.load(CU_SEQLENS + row), tl.load(CU_SEQLENS + row + 1)
    length, slot = tl.load(LENGTHS + row), tl.load(SLOTS + row).to(tl.int64)
    start = length - (end - begin)
    end = tl.where(end - begin > MAX_TOKENS, begin, end)
    return begin, end, start, slot, tl.where(per_row > 0, row * per_row, begin)


@triton.jit
def _convolved(
    QKV, WEIGHT, CONV, token, begin, start, has_slot, channel, qkv_row, tap_channel, tap,
    K: tl.constexpr, CONV_DIM: tl.constexpr,
):  # fmt: skip
    """-> (silu of the convolution at `token`; its inputs 3 to 0 tokens before).  Products are
    added from the oldest input to the newest."""
    x3 = input_before(QKV, CONV, 3, token, begin, start, has_slot, channel, qkv_row, K, CONV_DIM)
    x2 = input_before(QKV, CONV, 2, token, begin, start, has_slot, channel, qkv_row, K, CONV_DIM)
    x1 = input_before(QKV, CONV, 1, token, begin, start, has_slot, channel, qkv_row, K, CONV_DIM)
    x0 = input_before(QKV, CONV, 0, token, begin, start, has_slot, channel, qkv_row, K, CONV_DIM)
    total = weight_before(WEIGHT, 3, channel, tap_channel, tap, K) * x3.to(tl.float32)
    total += weight_before(WEIGHT, 2, channel, tap_channel, tap, K) * x2.to(tl.float32)
    total += weight_before(WEIGHT, 1, channel, tap_channel, tap, K) * x1.to(tl.float32)
    total += weight_before(WEIGHT, 0, channel, tap_channel, tap, K) * x0.to(tl.float32)
    return silu(total), x3, x2, x1, x0


@triton.jit
def _keep_inputs(
    QKV, CONV_POOL, SNAPSHOTS_AT, SNAPSHOTS, x3, x2, x1, x0, row, begin, end, start, slot, channel,
    qkv_row, conv_slot, snapshots_row, K: tl.constexpr, CONV_DIM: tl.constexpr,
    BORDERS: tl.constexpr,
):  # fmt: skip
    """The last inputs of `channel` to the row's slot, and those of its snapshots to theirs.

    x3 to x0  at the row's last token
    """
    conv = CONV_POOL + slot * conv_slot
    if SNAPSHOTS is not None:
        for border in range(BORDERS):
            kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
            last = begin - start + tl.load(SNAPSHOTS_AT + row) + border
            if (kept >= 0) & (last > begin) & (last <= end):
                copy_inputs(
                    QKV, conv, CONV_POOL + kept * conv_slot, last, begin, start, slot >= 0, channel,
                    qkv_row, K, CONV_DIM,
                )  # fmt: skip
    if slot >= 0:
        tl.debug_barrier()  # other threads may still read what this one replaces
        store_last_inputs(
            conv, x3, x2, x1, x0, start + end - begin - 1, end - begin, channel, K, CONV_DIM
        )


@triton.jit
def _store_units(QK, y, place, block, HK: tl.constexpr, DK: tl.constexpr, KEYS: tl.constexpr):
    """y [KEYS] as vectors of norm 1, of queries / sqrt(Dk)."""
    HEADS: tl.constexpr = KEYS // DK
    y = tl.reshape(y, (HEADS, DK))
    y = y * tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS)[:, None]
    y = y * tl.where(block < HK * DK // KEYS, DK**-0.5, 1.0)
    at = place.to(tl.int64) * (2 * HK * DK) + block * KEYS + tl.arange(0, KEYS)
    tl.store(QK + at, tl.reshape(y, (KEYS,)))


@triton.jit
def _store_values(
    V, GATES, B, A, A_LOG, DT_BIAS, y, token, place, block, b_row, a_row, HV: tl.constexpr,
    DV: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """y [VALUES], and the gates of these heads."""
    HEADS: tl.constexpr = VALUES // DV
    row, at = token.to(tl.int64), place.to(tl.int64)
    head = block * HEADS + tl.arange(0, HEADS)
    tl.store(V + at * (HV * DV) + block * VALUES + tl.arange(0, VALUES), y)
    b, a = tl.load(B + row * b_row + head), tl.load(A + row * a_row + head)
    decay = tl.exp(log_decay(a, tl.load(A_LOG + head), tl.load(DT_BIAS + head)))
    tl.store(GATES + (at * HV + head) * 2, decay)
    tl.store(GATES + (at * HV + head) * 2 + 1, step_size(b))


@triton.jit
def _channels(
    QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, SNAPSHOTS_AT, SNAPSHOTS, QK, V, GATES, row, begin, end,
    start, slot, place, block, qkv_row, b_row, a_row, tap_channel, tap, conv_slot, snapshots_row,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr,
    IS_VALUE: tl.constexpr, K: tl.constexpr, BORDERS: tl.constexpr,
):  # fmt: skip
    """The `block`-th CHANNELS of queries and keys, or of values, at all tokens of a row."""
    CONV_DIM: tl.constexpr = 2 * HK * DK + HV * DV
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    if IS_VALUE:
        channel += 2 * HK * DK
    nothing = tl.zeros([CHANNELS], QKV.dtype.element_ty)
    x3, x2, x1, x0 = nothing, nothing, nothing, nothing
    for i in tl.range(0, end - begin, disable_licm=True):  # weights kept would cost registers
        y, x3, x2, x1, x0 = _convolved(
            QKV, WEIGHT, CONV + slot * conv_slot, begin + i, begin, start, slot >= 0, channel,
            qkv_row, tap_channel, tap, K, CONV_DIM,
        )  # fmt: skip
        if IS_VALUE:
            _store_values(
                V, GATES, B, A, A_LOG, DT_BIAS, y, begin + i, place + i, block, b_row, a_row, HV,
                DV, CHANNELS,
            )  # fmt: skip
        else:
            _store_units(QK, y, place + i, block, HK, DK, CHANNELS)
    _keep_inputs(
        QKV, CONV, SNAPSHOTS_AT, SNAPSHOTS, x3, x2, x1, x0, row, begin, end, start, slot, channel,
        qkv_row, conv_slot, snapshots_row, K, CONV_DIM, BORDERS,
    )  # fmt: skip


@triton.jit
def decode_inputs(
    QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS,
    QK, V, GATES, block, row, per_row, qkv_row, b_row, a_row, tap_channel, tap, conv_slot,
    snapshots_row, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, MAX_TOKENS: tl.constexpr,
    BORDERS: tl.constexpr,
):  # fmt: skip
    """Of a row, the KEYS or VALUES channels of `block`, as kernel.py says."""
    KEY_BLOCKS: tl.constexpr = 2 * HK * DK // KEYS
    begin, end, start, slot, place = decode_row(
        CU_SEQLENS, LENGTHS, SLOTS, row, per_row, MAX_TOKENS
    )
    if begin < end:
        if block < KEY_BLOCKS:
            _channels(
                QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, SNAPSHOTS_AT, SNAPSHOTS, QK, V, GATES, row,
                begin, end, start, slot, place, block, qkv_row, b_row, a_row, tap_channel, tap,
                conv_slot, snapshots_row, HK, HV, DK, DV, KEYS, False, K, BORDERS,
            )  # fmt: skip
        else:
            _channels(
                QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, SNAPSHOTS_AT, SNAPSHOTS, QK, V, GATES, row,
                begin, end, start, slot, place, block - KEY_BLOCKS, qkv_row, b_row, a_row,
                tap_channel, tap, conv_slot, snapshots_row, HK, HV, DK, DV, VALUES, True, K,
                BORDERS,
            )  # fmt: skip
