# delta_net_decode: rows of 1 to 8 tokens, from the input projections to the output projection.
#   grid      (Hv * Dv / BLOCK_V, B + 1): a program has BLOCK_V columns of the state of a row and a
#             value head in registers, and handles the row's tokens one after the other.  Rows of
#             more tokens are left to the kernels for prompts.  The programs of the last row zero
#             the output of padding
#   reads     qkv, z, b, a at the row's tokens; the layer's weights; of the row's slot the last
#             inputs of the convolution, and the state, unless the sequence begins with this row
#   writes    out [T, Hv * Dv]; the state and the last inputs, in place, and where the sequence
#             reaches a position of `snapshots`, copies of them; raw [T, Hv * Dv] float32, o before
#             the gated norm, if BLOCK_V < Dv
#   math      float32, and the state rounded to its type.  With S before it decays, k^T S and q^T S
#             are summed at once, as are q^T q, k^T k and q^T k: with the decay e, and q and k of
#             norm 1 up to a factor, o = q^T (e S + k d^T) = e q^T S + (q^T k) d
#   order     The inputs of a query and key head are read by all programs of its value heads, and
#             replaced by the one of them that ends last, which also has the gated norm of the heads
#             whose columns several programs have: each counts itself when it has read the inputs
#             and stored o.  Which one that is changes nothing.  The inputs and the state of columns
#             have one program
#   launch    before the wait it reads lengths and slots, and prefetches the states of the first
#             rows into L2: a prefetch reads nothing, so that a kernel which still writes the state
#             does no harm
#   bound     memory: each state once read and once written, 2 * B * Hv * Dk * Dv * 4 bytes
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_decode.py against float64
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.delta_net.convolution import (
    copy_inputs,
    input_before,
    log_decay,
    silu,
    step_size,
    store_last_inputs,
    weight_before,
)
from model_zoo.layers.delta_net.inputs import (
    MAX_DECODE_TOKENS,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.reference import L2_EPS
from model_zoo.layers.delta_net.tiles import DecodeTiles
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
    """Prefetch a state into L2: one thread says so."""
    size: tl.constexpr = DK * DV * (STATE.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,r", [STATE.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _two_sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _gated(o, z, weight, eps, DV: tl.constexpr):
    """The gated norm of o [..., DV]."""
    mean = tl.sum(o * o, len(o.shape) - 1, keep_dims=True) / DV
    return o * tl.rsqrt(mean + eps) * weight.to(tl.float32) * silu(z.to(tl.float32))


@triton.jit
def _convolved(WEIGHT, x3, x2, x1, x0, channel, tap_channel, tap, K: tl.constexpr):
    """silu of the convolution, whose products are added from the oldest input to the newest."""
    total = weight_before(WEIGHT, 3, channel, tap_channel, tap, K) * x3.to(tl.float32)
    total += weight_before(WEIGHT, 2, channel, tap_channel, tap, K) * x2.to(tl.float32)
    total += weight_before(WEIGHT, 1, channel, tap_channel, tap, K) * x1.to(tl.float32)
    total += weight_before(WEIGHT, 0, channel, tap_channel, tap, K) * x0.to(tl.float32)
    return silu(total)


@triton.jit
def _inputs(QKV, CONV, token, begin, channel, continued, qkv_row, K: tl.constexpr):
    """Those of the convolution at `token`, oldest first."""
    x3 = input_before(QKV, CONV, 3, token, begin, channel, continued, qkv_row, K)
    x2 = input_before(QKV, CONV, 2, token, begin, channel, continued, qkv_row, K)
    x1 = input_before(QKV, CONV, 1, token, begin, channel, continued, qkv_row, K)
    x0 = input_before(QKV, CONV, 0, token, begin, channel, continued, qkv_row, K)
    return x3, x2, x1, x0


@triton.jit
def _step(
    s, q, k, v, Z, B, A, A_LOG, DT_BIAS, NORM, RAW, OUT, token, head, part, eps, z_row, b_row,
    a_row, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token: o is stored, after the gated norm if all columns are here; -> the state after.

    q, k, v  after convolution and silu
    """
    row = token.to(tl.int64)
    dim = head * DV + part * BLOCK_V + tl.arange(0, BLOCK_V)
    b, a = tl.load(B + row * b_row + head), tl.load(A + row * a_row + head)
    a_log, dt_bias = tl.load(A_LOG + head), tl.load(DT_BIAS + head)
    if BLOCK_V == DV:
        z, norm = tl.load(Z + row * z_row + dim), tl.load(NORM + tl.arange(0, DV))
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _three_sums)
    q_scale, k_scale = tl.rsqrt(qq + UNIT_EPS) * (DK**-0.5), tl.rsqrt(kk + UNIT_EPS)
    decay = tl.exp(log_decay(a, a_log, dt_bias))
    predicted, o = tl.reduce((s * k[:, None], s * q[:, None]), 0, _two_sums)
    delta = (v - predicted * (decay * k_scale)) * step_size(b)
    o = o * (decay * q_scale) + (qk * q_scale * k_scale) * delta
    s = s * decay + (k * k_scale)[:, None] * delta[None, :]
    if BLOCK_V == DV:
        o = _gated(o, z, norm, eps, DV)
        tl.store(OUT + row * (HV * DV) + dim, o.to(OUT.dtype.element_ty))
    else:
        tl.store(RAW + row * (HV * DV) + dim, o)
    return s


@triton.jit
def _norm_of_heads(
    RAW, Z, NORM, OUT, begin, end, key_head, eps, z_row, HV: tl.constexpr, DV: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gated norm of a key head's value heads, GROUP of them, at all tokens of a row."""
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DV)[None, :]
    weight, real = tl.load(NORM + dim), head < GROUP
    at = (key_head * GROUP + head) * DV + dim
    for i in range(end - begin):
        row = (begin + i).to(tl.int64)
        z = tl.load(Z + row * z_row + at, mask=real, other=0.0)
        o = tl.load(RAW + row * (HV * DV) + at, mask=real, other=0.0, cache_modifier=".cg")
        o = _gated(o, z, weight, eps, DV)
        tl.store(OUT + row * (HV * DV) + at, o.to(OUT.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _delta_net_decode(
    QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, STATE, CU_SEQLENS, LENGTHS, SLOTS,
    SNAPSHOTS_AT, SNAPSHOTS, ARRIVED, RAW, OUT, tokens, eps, qkv_row, z_row, b_row, a_row,
    tap_channel, tap, conv_slot, state_slot, snapshots_row, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, MAX_TOKENS: tl.constexpr, BORDERS: tl.constexpr,
    PREFETCHED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = DV // BLOCK_V
    GROUP: tl.constexpr = HV // HK
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    begin = tl.load(CU_SEQLENS + row)
    if row == tl.num_programs(1) - 1:
        if DEPENDENT:
            wait_for_launcher()
        if part == 0:
            _zero_padding(OUT, begin, tokens, head, HV, DV)
        return
    end = tl.load(CU_SEQLENS + row + 1)
    length = tl.load(LENGTHS + row)
    slot = tl.load(SLOTS + row).to(tl.int64)
    if (end == begin) | (end - begin > MAX_TOKENS):
        return
    start = length - (end - begin)
    has_slot = slot >= 0
    continued = (start > 0) & has_slot
    CONV_POOL, STATE_POOL = CONV, STATE + head * (DK * DV)
    CONV += slot * conv_slot
    STATE = STATE_POOL + slot * state_slot
    if DEPENDENT:
        if continued & (part == 0) & (row < PREFETCHED):
            _prefetch_state(STATE, DK, DV)
        wait_for_launcher()
    column = part * BLOCK_V + tl.arange(0, BLOCK_V)
    at = tl.arange(0, DK)[:, None] * DV + column[None, :]
    s = tl.load(STATE + at, mask=continued, other=0.0).to(tl.float32)
    query = head // GROUP * DK + tl.arange(0, DK)
    key, value = HK * DK + query, 2 * HK * DK + head * DV + column
    no_key = tl.zeros([DK], CONV.dtype.element_ty)
    no_value = tl.zeros([BLOCK_V], CONV.dtype.element_ty)
    q2, q1, q0, k2, k1, k0 = no_key, no_key, no_key, no_key, no_key, no_key
    v2, v1, v0 = no_value, no_value, no_value
    for i in tl.range(0, end - begin, disable_licm=True):  # addresses kept would cost registers
        token = begin + i
        q3, q2, q1, q0 = _inputs(QKV, CONV, token, begin, query, continued, qkv_row, K)
        k3, k2, k1, k0 = _inputs(QKV, CONV, token, begin, key, continued, qkv_row, K)
        v3, v2, v1, v0 = _inputs(QKV, CONV, token, begin, value, continued, qkv_row, K)
        s = _step(
            s, _convolved(CONV_WEIGHT, q3, q2, q1, q0, query, tap_channel, tap, K),
            _convolved(CONV_WEIGHT, k3, k2, k1, k0, key, tap_channel, tap, K),
            _convolved(CONV_WEIGHT, v3, v2, v1, v0, value, tap_channel, tap, K), Z, B, A, A_LOG,
            DT_BIAS, NORM, RAW, OUT, token, head, part, eps, z_row, b_row, a_row, HV, DK, DV,
            BLOCK_V,
        )  # fmt: skip
        if SNAPSHOTS is not None:
            border = start + i + 1 - tl.load(SNAPSHOTS_AT + row)
            if (border >= 0) & (border < BORDERS):
                kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
                if kept >= 0:
                    tl.store(STATE_POOL + kept * state_slot + at, s.to(STATE.dtype.element_ty))
    if has_slot:
        tl.store(STATE + at, s.to(STATE.dtype.element_ty))
    if SNAPSHOTS is not None:
        for border in range(BORDERS):
            kept = tl.load(SNAPSHOTS + row * snapshots_row + border).to(tl.int64)
            last = begin - start + tl.load(SNAPSHOTS_AT + row) + border
            if (kept >= 0) & (last > begin) & (last <= end):
                copy_inputs(
                    QKV, CONV, CONV_POOL + kept * conv_slot, last, begin, continued, head, part,
                    qkv_row, HK, HV, DK, DV, BLOCK_V, K, COLUMNS,
                )  # fmt: skip
    if has_slot | (PARTS > 1):
        # All threads of the program, and of those of the same key head, have read old inputs.
        if _is_last_to_arrive(ARRIVED + row * HK + head // GROUP, GROUP * PARTS):
            if has_slot:
                store_last_inputs(CONV, q2, q1, q0, query, K)
                store_last_inputs(CONV, k2, k1, k0, key, K)
            if PARTS > 1:
                _norm_of_heads(
                    RAW, Z, NORM, OUT, begin, end, head // GROUP, eps, z_row, HV, DV, GROUP, HEADS
                )
        if has_slot:
            store_last_inputs(CONV, v2, v1, v0, value, K)


def delta_net_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    out: Tensor,
    tiles: DecodeTiles | None = None,
) -> None:
    """gated_delta_net of the rows with at most MAX_DECODE_TOKENS tokens, or of all of them if
    they are to be computed token by token, into out [T, Hv * Dv]."""
    tiles = tiles or DecodeTiles()
    _, value_heads, key_dim, value_dim = state.state.shape
    key_heads, size = state.key_heads, weights.conv.shape[1]
    assert out.is_contiguous() and rows.num_rows * key_heads <= TILES
    snapshots, most = rows.snapshots, ANY if rows.token_by_token else MAX_DECODE_TOKENS
    block_v, raw = min(tiles.block_v, value_dim), None
    if block_v < value_dim:
        raw = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _delta_net_decode[(value_heads * (value_dim // block_v), rows.num_rows + 1)](
        qkv, z, b, a, weights.conv, weights.a_log, weights.dt_bias, weights.norm, state.conv,
        state.state, rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        None if snapshots is None else snapshots.first,
        None if snapshots is None else snapshots.slots, workspace(qkv.device)[1], raw, out,
        len(qkv), weights.norm_eps, qkv.stride(0), z.stride(0), b.stride(0), a.stride(0),
        *weights.conv.stride(), state.conv.stride(0), state.state.stride(0),
        0 if snapshots is None else snapshots.slots.stride(0), HK=key_heads, HV=value_heads,
        DK=key_dim, DV=value_dim, BLOCK_V=block_v, K=size,
        COLUMNS=triton.next_power_of_2(size - 1),
        HEADS=triton.next_power_of_2(value_heads // key_heads), MAX_TOKENS=most,
        BORDERS=0 if snapshots is None else snapshots.slots.shape[1], PREFETCHED=tiles.prefetched,
        num_warps=tiles.warps, maxnreg=tiles.registers,
        **dependent_launch(qkv.device),
    )  # fmt: skip
