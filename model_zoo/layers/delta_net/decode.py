# delta_net_decode: rows of 1 to 8 tokens, from the input projections to the output projection.
#   grid      (Hv, B + 1): a program has the state [Dk, Dv] of a row and a value head in registers,
#             and handles the row's tokens one after the other.  Rows of more tokens are left to the
#             kernels for prompts.  The programs of the last row zero the output of padding
#   reads     qkv, z, b, a at the row's tokens; the layer's weights; of the row's slot the last
#             inputs of the convolution, and the state, unless the sequence begins with this row
#   writes    out [T, Hv * Dv]; the state and the last inputs, in place, and where the sequence
#             reaches a position of `snapshots`, copies of them
#   math      float32, and the state rounded to its type.  With S decayed, k^T S and q^T S are
#             summed at once: o = q^T (S + k d^T) = q^T S + (q^T k) d
#   order     The inputs of a query and key head are read by the Hv / Hk programs of its value
#             heads, and replaced by the one of them that ends last: each counts itself when it has
#             read them.  Which one that is changes nothing.  Those of a value head, and its state,
#             have one program
#   launch    before the wait it reads lengths and slots, and prefetches the state into L2: a
#             prefetch reads nothing, so that a kernel which still writes the state does no harm
#   bound     memory: each state once read and once written, 2 * B * Hv * Dk * Dv * 4 bytes
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_decode.py against float64
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.delta_net.convolution import (
    convolved,
    copy_inputs,
    last_inputs,
    log_decay,
    silu,
    step_size,
    store_inputs,
)
from model_zoo.layers.delta_net.inputs import (
    MAX_DECODE_TOKENS,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.reference import L2_EPS
from model_zoo.layers.gemm.implementations import TILES, workspace
from model_zoo.layers.gemm.split_k import _is_last_to_arrive

ANY = 1 << 30  # tokens of a row
UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def _zero_padding(OUT, first, tokens, head, HV: tl.constexpr, DV: tl.constexpr):
    at = head * DV + tl.arange(0, DV)
    for i in range(tokens - first):
        zeros = tl.zeros([DV], OUT.dtype.element_ty)
        tl.store(OUT + (first + i).to(tl.int64) * (HV * DV) + at, zeros)


@triton.jit
def _prefetch_state(STATE, DK: tl.constexpr, DV: tl.constexpr):
    """Prefetch a state into L2, a row of it at a time."""
    rows = (STATE + tl.arange(0, DK) * DV).to(tl.int64)
    row_bytes: tl.constexpr = DV * (STATE.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [rows, tl.full([DK], row_bytes, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _step(
    s, QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, OUT, token, begin, continued, head,
    eps, qkv_row, z_row, b_row, a_row, tap_channel, tap, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One token: its output is stored; -> the state after it."""
    key = head // (HV // HK) * DK + tl.arange(0, DK)
    value = 2 * HK * DK + head * DV + tl.arange(0, DV)
    has_old = continued & (token - begin < K - 1)
    q = convolved(QKV, CONV, CONV_WEIGHT, token, begin, key, has_old, qkv_row, tap_channel, tap, K)
    k = convolved(
        QKV, CONV, CONV_WEIGHT, token, begin, HK * DK + key, has_old, qkv_row, tap_channel, tap, K
    )
    v = convolved(
        QKV, CONV, CONV_WEIGHT, token, begin, value, has_old, qkv_row, tap_channel, tap, K
    )
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS) * (DK**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
    row = token.to(tl.int64)
    beta = step_size(tl.load(B + row * b_row + head))
    g = log_decay(tl.load(A + row * a_row + head), tl.load(A_LOG + head), tl.load(DT_BIAS + head))
    s *= tl.exp(g)
    predicted = tl.sum(s * k[:, None], 0)
    o = tl.sum(s * q[:, None], 0)
    delta = (v - predicted) * beta
    o += tl.sum(q * k, 0) * delta
    s += k[:, None] * delta[None, :]
    dim = tl.arange(0, DV)
    o *= tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * tl.load(NORM + dim).to(tl.float32)
    o *= silu(tl.load(Z + row * z_row + head * DV + dim).to(tl.float32))
    tl.store(OUT + row * (HV * DV) + head * DV + dim, o.to(OUT.dtype.element_ty))
    return s


@triton.jit(do_not_specialize=["tokens"])
def _delta_net_decode(
    QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, STATE, CU_SEQLENS, LENGTHS, SLOTS,
    SNAPSHOTS, ARRIVED, OUT, tokens, eps, qkv_row, z_row, b_row, a_row, tap_channel, tap, conv_slot,
    state_slot, snapshots_row, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, MAX_TOKENS: tl.constexpr,
    EVERY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    begin = tl.load(CU_SEQLENS + row)
    if row == tl.num_programs(1) - 1:
        if DEPENDENT:
            wait_for_launcher()
        _zero_padding(OUT, begin, tokens, head, HV, DV)
        return
    end = tl.load(CU_SEQLENS + row + 1)
    if (end == begin) | (end - begin > MAX_TOKENS):
        return
    start = tl.load(LENGTHS + row) - (end - begin)
    slot = tl.load(SLOTS + row).to(tl.int64)
    has_slot = slot >= 0
    continued = (start > 0) & has_slot
    CONV_POOL, STATE_POOL = CONV, STATE + head * (DK * DV)
    CONV += slot * conv_slot
    STATE = STATE_POOL + slot * state_slot
    if DEPENDENT:
        if continued:
            _prefetch_state(STATE, DK, DV)
        wait_for_launcher()
    at = tl.arange(0, DK)[:, None] * DV + tl.arange(0, DV)[None, :]
    s = tl.load(STATE + at, mask=continued, other=0.0).to(tl.float32)
    group: tl.constexpr = HV // HK
    for i in range(end - begin):
        token = begin + i
        s = _step(
            s, QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, OUT, token, begin, continued,
            head, eps, qkv_row, z_row, b_row, a_row, tap_channel, tap, HK, HV, DK, DV, K,
        )  # fmt: skip
        if SNAPSHOTS is not None:  # noqa: SIM102
            if (start + i + 1) % EVERY == 0:
                border = (start + i + 1) // EVERY - start // EVERY - 1
                kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
                if kept >= 0:
                    tl.store(STATE_POOL + kept * state_slot + at, s.to(STATE.dtype.element_ty))
    if has_slot:
        tl.store(STATE + at, s.to(STATE.dtype.element_ty))
    if SNAPSHOTS is not None:
        for border in range((start + end - begin) // EVERY - start // EVERY):
            kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
            if kept >= 0:
                last = begin - start + (start // EVERY + 1 + border) * EVERY
                copy_inputs(
                    QKV, CONV, CONV_POOL + kept * conv_slot, last, begin, continued, head, 0,
                    qkv_row, HK, HV, DK, DV, DV, K, COLUMNS,
                )  # fmt: skip
    if has_slot:
        key = head // group * DK + tl.arange(0, DK)
        value = 2 * HK * DK + head * DV + tl.arange(0, DV)
        new_values = last_inputs(QKV, CONV, end, begin, value, continued, qkv_row, K, COLUMNS)
        new_queries = last_inputs(QKV, CONV, end, begin, key, continued, qkv_row, K, COLUMNS)
        new_keys = last_inputs(QKV, CONV, end, begin, HK * DK + key, continued, qkv_row, K, COLUMNS)
        # All threads of the program, and of those of the same key head, have read old inputs.
        if _is_last_to_arrive(ARRIVED + row * HK + head // group, group):
            store_inputs(CONV, new_queries, key, K, COLUMNS)
            store_inputs(CONV, new_keys, HK * DK + key, K, COLUMNS)
        store_inputs(CONV, new_values, value, K, COLUMNS)


def delta_net_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    out: Tensor,
    *,
    num_warps: int = 4,
) -> None:
    """gated_delta_net of the rows with at most MAX_DECODE_TOKENS tokens, or of all of them if
    they are to be computed token by token, into out [T, Hv * Dv]."""
    _, value_heads, key_dim, value_dim = state.state.shape
    key_heads, size = state.key_heads, weights.conv.shape[1]
    assert out.is_contiguous() and rows.num_rows * key_heads <= TILES
    snapshots, most = rows.snapshots, ANY if rows.token_by_token else MAX_DECODE_TOKENS
    assert snapshots is None or not rows.token_by_token, "a row reaches one border at most"
    _delta_net_decode[(value_heads, rows.num_rows + 1)](
        qkv, z, b, a, weights.conv, weights.a_log, weights.dt_bias, weights.norm, state.conv,
        state.state, rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        None if snapshots is None else snapshots.slots, workspace(qkv.device)[1], out, len(qkv),
        weights.norm_eps, qkv.stride(0), z.stride(0), b.stride(0), a.stride(0),
        *weights.conv.stride(), state.conv.stride(0), state.state.stride(0),
        0 if snapshots is None else snapshots.slots.stride(0), HK=key_heads, HV=value_heads,
        DK=key_dim, DV=value_dim, K=size, COLUMNS=triton.next_power_of_2(size - 1),
        MAX_TOKENS=most, EVERY=0 if snapshots is None else snapshots.every,
        num_warps=num_warps, **dependent_launch(qkv.device),
    )  # fmt: skip
