# decode_one_token: rows of one token, while a multiprocessor has one state at most.
#   grid      B * Hv: a program has the state of a value head in registers, and computes its inputs
#             itself.  kernel.py computes those of a key head once, and waits for them; where states
#             do not wait for each other, that takes longer than to compute them several times
#   reads     qkv, z, b, a at the row's token; the layer's weights; of the row's slot the last
#             inputs of the convolution, and the state, unless the sequence begins with this token
#   writes    out [T, Hv * Dv], after the gated norm; the state, in place; the token's input of the
#             convolution, at a place that no program reads.  The programs of the last row zero the
#             output of padding
#   math      float32, and the state rounded to its type.  Queries and keys are divided by their
#             norms after the products with the state, so that these need not wait for the norms
#   launch    before the wait a program reads lengths, slots and what is of earlier steps: the
#             state, and the convolution's sum but for its last product
#   bound     latency: after the wait a read, three sums over a program that depend on each other,
#             and the write of the state
#   checked   tests/model_zoo/layers/delta_net/test_decode_one_token.py against float64
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.delta_net.convolution import log_decay, silu, step_size
from model_zoo.layers.delta_net.decode.inputs import UNIT_EPS
from model_zoo.layers.delta_net.decode.kernel import multiprocessors
from model_zoo.layers.delta_net.decode.states import two_sums, zero_padding
from model_zoo.layers.delta_net.inputs import DeltaNetRows, DeltaNetState, DeltaNetWeights

STATE_REGISTERS = 64  # of a thread, at most


@triton.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sum_before(
    WEIGHT, CONV, position, channel, mask, tap_channel, tap, K: tl.constexpr, CONV_DIM: tl.constexpr
):
    """The convolution at `position` without its newest input, from the oldest to the newest."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(K - 1, 0, -1):
        at = position - back
        x = tl.load(CONV + at % K * CONV_DIM + channel, mask=mask & (at >= 0), other=0.0)
        weight = WEIGHT + channel * tap_channel + (K - 1 - back) * tap
        total += tl.load(weight, mask=mask, other=0.0).to(tl.float32) * x.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _one_token(
    QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, STATE, Z, NORM, CU_SEQLENS, LENGTHS, SLOTS, OUT,
    tokens, eps, qkv_row, b_row, a_row, tap_channel, tap, conv_slot, z_row, state_slot,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    CONV_DIM: tl.constexpr = (2 * HK + HV) * D
    row, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    begin, end = tl.load(CU_SEQLENS + row), tl.load(CU_SEQLENS + row + 1)
    position, slot = tl.load(LENGTHS + row) - 1, tl.load(SLOTS + row).to(tl.int64)
    is_real, has_slot = begin < end, (begin < end) & (slot >= 0)
    dim = tl.arange(0, D)
    at = STATE + slot * state_slot + head * (D * D) + dim[:, None] * D + dim[None, :]
    s = tl.load(at, mask=has_slot & (position > 0), other=0.0).to(tl.float32)
    # The query, the key, the value and the output's gate, side by side: two elements of a thread.
    # The gate is a convolution of one input, whose weight is 1.
    i = tl.arange(0, 4 * D)
    vector, i = i // D, i % D
    is_gate, of_head, key_head = vector == 3, head * D + i, head // (HV // HK)
    channel = tl.where(vector == 2, 2 * HK * D + of_head, (vector * HK + key_head) * D + i)
    conv = CONV + slot * conv_slot
    total = _sum_before(
        WEIGHT, conv, position, channel, has_slot & (vector < 3), tap_channel, tap, K, CONV_DIM
    )
    weight = WEIGHT + channel * tap_channel + (K - 1) * tap
    weight = tl.load(weight, mask=vector < 3, other=1.0).to(tl.float32)
    norm = tl.load(NORM + i, mask=is_gate, other=1.0).to(tl.float32)
    a_log, dt_bias = tl.load(A_LOG + head), tl.load(DT_BIAS + head)
    if DEPENDENT:
        wait_for_launcher()
    if (row + 1) * HV >= tl.num_programs(0):
        zero_padding(OUT, end, tokens, head, HV, D)
    if is_real:
        token = begin.to(tl.int64)
        x = tl.load(tl.where(is_gate, Z + token * z_row + of_head, QKV + token * qkv_row + channel))
        b, a = tl.load(B + token * b_row + head), tl.load(A + token * a_row + head)
        y = silu(total + weight * x.to(tl.float32)) * norm
        qv, kg = tl.split(tl.trans(tl.reshape(y, (2, 2, D)), (2, 0, 1)))
        q, v = tl.split(qv)
        k, gate = tl.split(kg)
        decay, beta = tl.exp(log_decay(a, a_log, dt_bias)), step_size(b)
        predicted, o = tl.reduce((s * k[None, :], s * q[None, :]), 1, two_sums)
        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _three_sums)
        unit_q, unit_k = tl.rsqrt(qq + UNIT_EPS) * D**-0.5, tl.rsqrt(kk + UNIT_EPS)
        delta = (v - predicted * (unit_k * decay)) * beta
        s = s * decay + (delta * unit_k)[:, None] * k[None, :]
        tl.store(at, s.to(STATE.dtype.element_ty), mask=has_slot)
        o = o * (unit_q * decay) + qk * (unit_q * unit_k) * delta
        o *= tl.rsqrt(tl.sum(o * o) / D + eps) * gate
        tl.store(OUT + (token * HV + head) * D + dim, o.to(OUT.dtype.element_ty))
        is_first = (vector == 2) | ((vector < 2) & (head % (HV // HK) == 0))  # of the channel
        tl.store(conv + position % K * CONV_DIM + channel, x, mask=is_first & has_slot)


def serves(state: DeltaNetState, rows: DeltaNetRows) -> bool:
    """Whether decode_one_token computes these rows, and in less time than delta_net_decode."""
    _, heads, value_dim, key_dim = state.state.shape
    if rows.max_tokens > 1 or rows.token_by_token or rows.snapshots is not None:
        return False
    processors = multiprocessors(state.state.device)
    return key_dim == value_dim and 0 < rows.num_rows * heads <= processors


def decode_one_token(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    out: Tensor,
) -> None:
    """gated_delta_net of rows of one token or none, into out [T, Hv * Dv].

    Keys are as wide as values; no snapshots.  Its bits are not those of delta_net_decode.
    """
    _, heads, dim, key_dim = state.state.shape
    assert rows.max_tokens <= 1 and rows.snapshots is None and out.is_contiguous()
    assert key_dim == dim
    _one_token[(rows.num_rows * heads,)](
        qkv, b, a, weights.conv, weights.a_log, weights.dt_bias, state.conv, state.state, z,
        weights.norm, rows.cu_seqlens, rows.cache_seqlens, rows.slots, out, len(qkv),
        weights.norm_eps, qkv.stride(0), b.stride(0), a.stride(0), *weights.conv.stride(),
        state.conv.stride(0), z.stride(0), state.state.stride(0), HK=state.key_heads, HV=heads,
        D=dim, K=weights.conv.shape[1],
        num_warps=max(1, dim * dim // (32 * STATE_REGISTERS)), **dependent_launch(qkv.device),
    )  # fmt: skip
