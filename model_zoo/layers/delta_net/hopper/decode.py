"""delta_net_decode of rows of one token on Hopper (sm_90), in Gluon: states through shared memory.

_decode: persistent programs, in which a load warp is up to STAGES states ahead.
  unit      a row and a key head; its states are those of the key head's value heads, one after the
            other, whole: [128, 128]
  grid      any number of programs; program p has units p, p + programs, ...
  load      one warp: states by TMA.  Before the wait it prefetches its first ones into L2
  inputs    four warps: the convolution, norms and gates of a state's vectors, into shared memory;
            the last inputs of the convolution, which no other program reads
  update    eight warps: the state from shared memory, its update back to where it was, from where
            it is stored by TMA; the output, after the gated norm
  math      as decode.py
  bound     memory: each state once read and once written
  checked   tests/model_zoo/layers/delta_net/test_hopper_delta_net.py, interpreted and on a GPU
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DIM = gl.constexpr(128)
LOG2_E = gl.constexpr(1.4426950408889634)
# The vectors of a state that the inputs' warps write, of which some are one number again and again.
QUERY, KEY, VALUE, DECAY, KEY_FACTOR, QK, GATE = (gl.constexpr(i) for i in range(7))
VECTORS = gl.constexpr(7)


@gluon.jit
def _silu(x):
    """As that of convolution.py."""
    root = gl.rsqrt(1.0 + gl.exp2(x * -LOG2_E))
    return x * root * root


@gluon.jit
def _unit(CU_SEQLENS, LENGTHS, SLOTS, unit, HK: gl.constexpr):
    """-> (row, key head, token, whether the row has one, whether its sequence has more, slot)."""
    row = unit // HK
    token = gl.load(CU_SEQLENS + row)
    has_token = gl.load(CU_SEQLENS + row + 1) > token
    slot = gl.load(SLOTS + row).to(gl.int32)
    return row, unit % HK, token, has_token, (gl.load(LENGTHS + row) > 1) & (slot >= 0), slot


@gluon.jit
def _kept(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS: gl.constexpr):
    """The slot of a snapshot that the row's token reaches, or -1."""
    kept = -1
    if BORDERS > 0:
        border = gl.load(LENGTHS + row) - gl.load(SNAPSHOTS_AT + row)
        if (border >= 0) & (border < BORDERS):
            kept = gl.load(SNAPSHOTS + row * snapshots_row + border).to(gl.int32)
    return kept


@gluon.jit
def _load(
    state_desc, states, full, empty, STATE, CU_SEQLENS, LENGTHS, SLOTS, units, state_slot,
    HK: gl.constexpr, HV: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp."""
    STAGES: gl.constexpr = states.shape[0]
    GROUP: gl.constexpr = HV // HK
    if DEPENDENT:
        unit = gl.program_id(0)
        _row, key_head, _token, has_token, continued, slot = _unit(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token & continued:
            PART: gl.constexpr = DIM * DIM // 32
            lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
            first = STATE + slot.to(gl.int64) * state_slot + key_head * (GROUP * DIM * DIM)
            for i in gl.static_range(GROUP if GROUP < STAGES else STAGES):
                at = (first + (i * (DIM * DIM) + lane * PART)).to(gl.int64)
                nbytes = gl.zeros_like(lane) + PART * (
                    STATE.dtype.element_ty.primitive_bitwidth // 8
                )
                gl.inline_asm_elementwise(
                    "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                    [at, nbytes], dtype=gl.int32, is_pure=False, pack=1,
                )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _row, key_head, _token, has_token, continued, slot = _unit(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token:
            for i in range(GROUP):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                if continued:
                    mbarrier.expect(full.index(stage), state_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        state_desc, [slot, (key_head * GROUP + i) * DIM, 0], full.index(stage),
                        states.index(stage).reshape([1, DIM, DIM]),
                    )  # fmt: skip
                else:
                    mbarrier.arrive(full.index(stage), count=1)
                count += 1


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
    return _silu(total)


@gluon.jit
def _log_decay(a, a_log, dt_bias):
    """As that of convolution.py."""
    x = a.to(gl.float32) + dt_bias.to(gl.float32)
    softplus = gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))
    return -gl.exp(a_log.to(gl.float32)) * softplus


@gluon.jit
def _inputs(
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
        row, key_head, token, has_token, continued, slot = _unit(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token:
            kept = _kept(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS)
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
                vectors.index(first + GATE).store(norm * _silu(z))
                mbarrier.arrive(ready.index(stage), count=1)
                count += 1
    # The output of padding is zero.
    padding = gl.load(CU_SEQLENS + rows) + gl.program_id(0)
    for i in range(0, tokens - padding, gl.num_programs(0)):
        for head in range(HV):
            at = OUT + (padding + i).to(gl.int64) * (HV * DIM) + head * DIM + dim
            gl.store(at, zeros.to(OUT.dtype.element_ty))


@gluon.jit
def _update(
    state_desc, states, vectors, full, ready, empty, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT,
    SNAPSHOTS, OUT, units, eps, snapshots_row, HK: gl.constexpr, HV: gl.constexpr,
    BORDERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Eight warps: states and outputs."""
    STAGES: gl.constexpr = states.shape[0]
    GROUP: gl.constexpr = HV // HK
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    of_keys: gl.constexpr = gl.SliceLayout(1, layout)
    of_values: gl.constexpr = gl.SliceLayout(0, layout)
    if DEPENDENT:
        gdc_wait()
    dim = gl.arange(0, DIM, of_values)
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, key_head, token, has_token, continued, slot = _unit(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token:
            kept = _kept(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS)
            for i in range(GROUP):
                head = key_head * GROUP + i
                stage = count % STAGES
                phase = (count // STAGES) & 1
                tile = states.index(stage)
                first = stage * VECTORS
                mbarrier.wait(ready.index(stage), phase)
                q, k = (
                    vectors.index(first + QUERY).load(of_keys),
                    vectors.index(first + KEY).load(of_keys),
                )
                v = vectors.index(first + VALUE).load(of_values)
                decay = vectors.index(first + DECAY).load(of_values)
                key_factor = vectors.index(first + KEY_FACTOR).load(of_values)
                qk = vectors.index(first + QK).load(of_values)
                gate = vectors.index(first + GATE).load(of_values)
                mbarrier.wait(full.index(stage), phase)
                s = tile.load(layout).to(gl.float32)
                if not continued:
                    s = gl.zeros_like(s)
                predicted = gl.sum(s * k[:, None], 0)
                o = gl.sum(s * q[:, None], 0)
                delta = v - predicted * key_factor
                o = o * decay + qk * delta
                s = s * decay[None, :] + k[:, None] * delta[None, :]
                tile.store(s.to(tile.dtype))
                fence_async_shared()
                if slot >= 0:
                    tma.async_copy_shared_to_global(
                        state_desc, [slot, head * DIM, 0], tile.reshape([1, DIM, DIM])
                    )
                if BORDERS > 0:  # noqa: SIM102 - Triton 3.6 does not compile a slot of -1
                    if kept >= 0:
                        tma.async_copy_shared_to_global(
                            state_desc, [kept, head * DIM, 0], tile.reshape([1, DIM, DIM])
                        )
                o = o * gl.rsqrt(gl.sum(o * o, 0) / DIM + eps) * gate
                at = OUT + token.to(gl.int64) * (HV * DIM) + head * DIM + dim
                gl.store(at, o.to(OUT.dtype.element_ty))
                tma.store_wait(0)  # the tile has been read
                mbarrier.arrive(empty.index(stage), count=1)
                count += 1


@gluon.jit(do_not_specialize=["tokens", "rows", "units"])
def _decode(
    state_desc, QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV, STATE, CU_SEQLENS, LENGTHS,
    SLOTS, SNAPSHOTS_AT, SNAPSHOTS, OUT, tokens, rows, units, eps, unit_eps, qkv_row, z_row, b_row,
    a_row, tap_channel, tap, conv_slot, state_slot, snapshots_row, HK: gl.constexpr,
    HV: gl.constexpr, STAGES: gl.constexpr, BORDERS: gl.constexpr, INPUT_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    BITS: gl.constexpr = 8 * state_desc.block_type.nbytes // (DIM * DIM)
    states = gl.allocate_shared_memory(
        state_desc.dtype, [STAGES, DIM, DIM], gl.NVMMASharedLayout(0, BITS, 2)
    )
    vectors = gl.allocate_shared_memory(
        gl.float32, [STAGES * VECTORS, DIM], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_update, (
                state_desc, states, vectors, full, ready, empty, CU_SEQLENS, LENGTHS, SLOTS,
                SNAPSHOTS_AT, SNAPSHOTS, OUT, units, eps, snapshots_row, HK, HV, BORDERS,
                DEPENDENT,
            )),
            (_inputs, (
                vectors, ready, empty, QKV, Z, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, NORM, CONV,
                CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, OUT, tokens, rows, units,
                unit_eps, qkv_row, z_row, b_row, a_row, tap_channel, tap, conv_slot, snapshots_row,
                HK, HV, STAGES, BORDERS, DEPENDENT,
            )),
            (_load, (
                state_desc, states, full, empty, STATE, CU_SEQLENS, LENGTHS, SLOTS, units,
                state_slot, HK, HV, DEPENDENT,
            )),
        ],
        [4, 1], [INPUT_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
