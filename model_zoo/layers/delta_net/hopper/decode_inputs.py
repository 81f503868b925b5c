"""The vectors of a state of a row of one token, on Hopper (sm_90), in Gluon: for decode.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from model_zoo.layers.delta_net.hopper.chunks import silu

DIM = gl.constexpr(128)
# The vectors of a state that the inputs' warps write, of which some are one number again and again.
QUERY, KEY, VALUE, DECAY, KEY_FACTOR, QK, GATE = (gl.constexpr(i) for i in range(7))
VECTORS = gl.constexpr(7)


@gluon.jit
def unit_of(CU_SEQLENS, LENGTHS, SLOTS, unit, HK: gl.constexpr):
    """-> (row, key head, token, whether the row has one, whether its sequence has more, slot)."""
    row = unit // HK
    token = gl.load(CU_SEQLENS + row)
    has_token = gl.load(CU_SEQLENS + row + 1) > token
    slot = gl.load(SLOTS + row).to(gl.int32)
    return row, unit % HK, token, has_token, (gl.load(LENGTHS + row) > 1) & (slot >= 0), slot


@gluon.jit
def kept_of(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS: gl.constexpr):
    """The slot of a snapshot that the row's token reaches, or -1."""
    kept = -1
    if BORDERS > 0:
        border = gl.load(LENGTHS + row) - gl.load(SNAPSHOTS_AT + row)
        if (border >= 0) & (border < BORDERS):
            kept = gl.load(SNAPSHOTS + row * snapshots_row + border).to(gl.int32)
    return kept


@gluon.jit
def _convolved(
    QKV, WEIGHT, CONV, token, slot, kept, continued, channel, qkv_row, conv_slot, tap_channel, tap,
    BORDERS: gl.constexpr,
):  # fmt: skip
    """silu of the convolution of four inputs, added from the oldest to the newest; the last three
    are stored in the slots that there are."""
    old = CONV + slot.to(gl.int64) * conv_slot + channel * 3
    has_old = (channel >= 0) & continued
    x0 = gl.load(QKV + token.to(gl.int64) * qkv_row + channel)
    x3 = gl.load(old, mask=has_old, other=0.0)
    x2 = gl.load(old + 1, mask=has_old, other=0.0)
    x1 = gl.load(old + 2, mask=has_old, other=0.0)
    weight = WEIGHT + channel * tap_channel
    total = gl.load(weight).to(gl.float32) * x3.to(gl.float32)
    total += gl.load(weight + tap).to(gl.float32) * x2.to(gl.float32)
    total += gl.load(weight + 2 * tap).to(gl.float32) * x1.to(gl.float32)
    total += gl.load(weight + 3 * tap).to(gl.float32) * x0.to(gl.float32)
    if slot >= 0:
        gl.store(old, x2)
        gl.store(old + 1, x1)
        gl.store(old + 2, x0)
    if BORDERS > 0:  # noqa: SIM102 - without snapshots this is not compiled
        if kept >= 0:
            new = CONV + kept.to(gl.int64) * conv_slot + channel * 3
            gl.store(new, x2)
            gl.store(new + 1, x1)
            gl.store(new + 2, x0)
    return silu(total)


@gluon.jit
def _log_decay(a, a_log, dt_bias):
    """As that of convolution.py."""
    x = a.to(gl.float32) + dt_bias.to(gl.float32)
    softplus = gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))
    return -gl.exp(a_log.to(gl.float32)) * softplus


@gluon.jit
def write_vectors(
    vectors, ready, empty, QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, CU_SEQLENS,
    LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, OUT, tokens, rows, units, unit_eps, qkv_row, z_row,
    b_row, a_row, tap_channel, tap, conv_slot, snapshots_row, HK: gl.constexpr, HV: gl.constexpr,
    STAGES: gl.constexpr, BORDERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: the vectors of each state."""
    GROUP: gl.constexpr = HV // HK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if DEPENDENT:
        gdc_wait()
    dim = gl.arange(0, DIM, layout)
    norm = gl.load(NORM + dim).to(gl.float32)
    zeros = gl.zeros([DIM], gl.float32, layout)
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, key_head, token, has_token, continued, slot = unit_of(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token:
            kept = kept_of(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS)
            query = key_head * DIM + dim
            q = _convolved(
                QKV, CONV_WEIGHT, CONV, token, slot, kept, continued, query, qkv_row, conv_slot,
                tap_channel, tap, BORDERS,
            )  # fmt: skip
            k = _convolved(
                QKV, CONV_WEIGHT, CONV, token, slot, kept, continued, HK * DIM + query, qkv_row,
                conv_slot, tap_channel, tap, BORDERS,
            )  # fmt: skip
            q = q * (gl.rsqrt(gl.sum(q * q, 0) + unit_eps) * DIM**-0.5)
            k = k * gl.rsqrt(gl.sum(k * k, 0) + unit_eps)
            qk = gl.sum(q * k, 0)
            for i in range(GROUP):
                head = key_head * GROUP + i
                at = token.to(gl.int64)
                a, b = gl.load(A + at * a_row + head), gl.load(B + at * b_row + head)
                a_log, dt_bias = gl.load(A_LOG + head), gl.load(DT_BIAS + head)
                z = gl.load(Z + at * z_row + head * DIM + dim).to(gl.float32)
                v = _convolved(
                    QKV, CONV_WEIGHT, CONV, token, slot, kept, continued,
                    2 * HK * DIM + head * DIM + dim, qkv_row, conv_slot, tap_channel, tap,
                    BORDERS,
                )  # fmt: skip
                beta = 1.0 / (1.0 + gl.exp(-b.to(gl.float32)))
                decay = gl.exp(_log_decay(a, a_log, dt_bias))
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                first = stage * VECTORS
                vectors.index(first + QUERY).store(q)
                vectors.index(first + KEY).store(k)
                vectors.index(first + VALUE).store(v * beta)
                vectors.index(first + DECAY).store(zeros + decay)
                vectors.index(first + KEY_FACTOR).store(zeros + decay * beta)
                vectors.index(first + QK).store(zeros + qk)
                vectors.index(first + GATE).store(norm * silu(z))
                mbarrier.arrive(ready.index(stage), count=1)
                count += 1
    # The output of padding is zero.
    padding = gl.load(CU_SEQLENS + rows) + gl.program_id(0)
    for i in range(0, tokens - padding, gl.num_programs(0)):
        for head in range(HV):
            at = OUT + (padding + i).to(gl.int64) * (HV * DIM) + head * DIM + dim
            gl.store(at, zeros.to(OUT.dtype.element_ty))
