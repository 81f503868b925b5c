"""What kernel.py computes of a row and value head: the state, and the gated outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.convolution import silu
from model_zoo.layers.delta_net.decode.inputs import decode_row


@triton.jit
def two_sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _step(
    s, z, norm, QK, V, GATES, OUT, token, place, head, eps, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One token, whose output is stored; -> the state [Dv, Dk] after it.

    z  [Dv] at the token
    """
    row, key, value = place.to(tl.int64), tl.arange(0, DK), tl.arange(0, DV)
    query = (row * 2 * HK + head // (HV // HK)) * DK + key
    q, k = tl.load(QK + query), tl.load(QK + query + HK * DK)
    at = row * HV + head
    v = tl.load(V + at * DV + value)
    decay, beta = tl.load(GATES + at * 2), tl.load(GATES + at * 2 + 1)
    predicted, o = tl.reduce((s * k[None, :], s * q[None, :]), 1, two_sums)
    delta = (v - predicted * decay) * beta
    o = o * decay + tl.sum(q * k) * delta
    o *= tl.rsqrt(tl.sum(o * o) / DV + eps) * norm.to(tl.float32)
    o *= silu(z.to(tl.float32))
    of_out = (token.to(tl.int64) * HV + head) * DV + value
    tl.store(OUT + of_out, o.to(OUT.dtype.element_ty))
    return s * decay + delta[:, None] * k[None, :]


@triton.jit
def _wait_for_inputs(READY, INPUTS: tl.constexpr, READERS: tl.constexpr):
    """Until INPUTS programs have counted themselves there: what they wrote before is visible.

    Each of READERS programs that wait, fewer than 2^15, counts itself, too, above 2^16.  The last
    one of them to do so resets the counts, so that the others wait for either.
    """
    before = tl.atomic_add(READY, 1 << 16, sem="acquire")
    counts = before + (1 << 16)
    while (counts != 0) & ((counts & 0xFFFF) < INPUTS):
        counts = tl.atomic_add(READY, 0, sem="acquire")
    if before >> 16 == READERS - 1:
        tl.atomic_xchg(READY, 0, sem="release")


@triton.jit
def zero_padding(OUT, first, tokens, head, HV: tl.constexpr, DV: tl.constexpr):
    at = head * DV + tl.arange(0, DV)
    for i in range(tokens - first):
        zeros = tl.zeros([DV], OUT.dtype.element_ty)
        tl.store(OUT + (first + i).to(tl.int64) * (HV * DV) + at, zeros)


@triton.jit
def decode_states(
    QK, V, GATES, STATE, Z, NORM, READY, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, OUT,
    tokens, eps, head, row, num_rows, per_row, z_row, state_slot, snapshots_row, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, INPUTS: tl.constexpr,
    MAX_TOKENS: tl.constexpr, BORDERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of a row, a value head, as kernel.py says; after the last row: padding.

    INPUTS  programs that count themselves at READY + row
    """
    if row == num_rows:
        if DEPENDENT:
            wait_for_launcher()
        zero_padding(OUT, tl.load(CU_SEQLENS + row), tokens, head, HV, DV)
        return
    begin, end, start, slot, place = decode_row(
        CU_SEQLENS, LENGTHS, SLOTS, row, per_row, MAX_TOKENS
    )
    at = tl.arange(0, DV)[:, None] * DK + tl.arange(0, DK)[None, :]
    STATE += head * (DK * DV)
    continued = (begin < end) & (start > 0) & (slot >= 0)
    s = tl.load(
        STATE + slot * state_slot + at, mask=continued, other=0.0, eviction_policy="evict_last"
    ).to(tl.float32)
    if DEPENDENT:
        wait_for_launcher()
    of_head = head * DV + tl.arange(0, DV)
    norm = tl.load(NORM + tl.arange(0, DV))
    z = tl.load(Z + begin.to(tl.int64) * z_row + of_head, mask=(begin < end) & (of_head >= 0))
    _wait_for_inputs(READY + row, INPUTS, HV)
    for i in tl.range(0, end - begin, disable_licm=True):  # addresses kept would cost registers
        token = begin + i
        s = _step(s, z, norm, QK, V, GATES, OUT, token, place + i, head, eps, HK, HV, DK, DV)
        if token + 1 < end:
            z = tl.load(Z + (token + 1).to(tl.int64) * z_row + of_head)
        if SNAPSHOTS is not None:
            border = start + i + 1 - tl.load(SNAPSHOTS_AT + row)
            if (border >= 0) & (border < BORDERS):
                kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
                if kept >= 0:
                    tl.store(STATE + kept * state_slot + at, s.to(STATE.dtype.element_ty))
    if (begin < end) & (slot >= 0):
        tl.store(STATE + slot * state_slot + at, s.to(STATE.dtype.element_ty))
