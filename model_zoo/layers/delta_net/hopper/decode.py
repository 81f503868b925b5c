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

from model_zoo.layers.delta_net.hopper.decode_inputs import (
    DECAY,
    GATE,
    KEY,
    KEY_FACTOR,
    QK,
    QUERY,
    VALUE,
    VECTORS,
    kept_of,
    unit_of,
    write_vectors,
)

DIM = gl.constexpr(128)


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
        _row, key_head, _token, has_token, continued, slot = unit_of(
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
        _row, key_head, _token, has_token, continued, slot = unit_of(
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
        row, key_head, token, has_token, continued, slot = unit_of(
            CU_SEQLENS, LENGTHS, SLOTS, unit, HK
        )
        if has_token:
            kept = kept_of(SNAPSHOTS_AT, SNAPSHOTS, LENGTHS, row, snapshots_row, BORDERS)
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
            (write_vectors, (
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
