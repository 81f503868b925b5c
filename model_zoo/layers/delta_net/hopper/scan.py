"""chunk_scan with the gated norm on Hopper (sm_90), in Gluon: a program has a whole value head.

_scan: a load warp, two warpgroups that multiply, and one for the gated norm.
  grid      programs * Hv: program p has head p % Hv of one row after the other
  tiles     a ring of STAGES chunks: q, k [CHUNK, 128], solve, p [CHUNK, CHUNK], the values of each
            warpgroup [CHUNK, 64], gates [2, CHUNK]; a ring of two of z.  Tiles are CHUNK tokens,
            also of shorter chunks: what is beyond the chunk is cleared where it would be multiplied
  multiply  a warpgroup has 64 columns of the state, transposed, in registers, as chunk_scan.py
            says.  It writes its o to where its values were
  norm      four warps: the gated norm of a chunk's o, whose stage is free then
  math      as chunk_scan.py and gated_norm.py: o is rounded to the type of qkv between them
  bound     tensor cores of the multiprocessors that have a program: 2,048 cycles a chunk
  checked   tests/model_zoo/layers/delta_net/test_hopper_delta_net.py, interpreted and on a GPU
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model_zoo.layers.delta_net.hopper.clear import clear

HALF = gl.constexpr(64)  # columns of the state that a warpgroup has
DIM = gl.constexpr(128)  # of keys and of values
CHUNK = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _row(ROWS, FIRST_CHUNKS, CU_SEQLENS, LENGTHS, number):
    """A row that is a prompt -> (row, first chunk, first token, one past the last, tokens that its
    sequence had before)."""
    row = gl.load(ROWS + number)
    begin, end = gl.load(CU_SEQLENS + row), gl.load(CU_SEQLENS + row + 1)
    return row, gl.load(FIRST_CHUNKS + number), begin, end, gl.load(LENGTHS + row) - (end - begin)


@gluon.jit
def _copy_z(z_desc, z, z_full, count, first, head):
    place = count % 2
    mbarrier.expect(z_full.index(place), 2 * z_desc.block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            z_desc, [first, head * DIM + half * HALF], z_full.index(place),
            z.index(2 * place + half),
        )  # fmt: skip


@gluon.jit
def _load(
    descs, tiles, full, empty, z_full, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS,
    HK: gl.constexpr, HV: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp."""
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc = descs
    PAIR: gl.constexpr = q_desc.block_type.nbytes + v_desc.block_type.nbytes
    BYTES: gl.constexpr = 2 * (PAIR + p_desc.block_type.nbytes) + gates_desc.block_type.nbytes
    q, k, v, solve, p, gates, z = tiles
    STAGES: gl.constexpr = q.shape[0]
    if DEPENDENT:
        gdc_wait()
    head = gl.program_id(0) % HV
    key_head = head // (HV // HK)
    count, z_token = 0, 0
    for number in range(gl.program_id(0) // HV, gl.load(COUNTS), gl.num_programs(0) // HV):
        _, index, begin, end, start = _row(ROWS, FIRST_CHUNKS, CU_SEQLENS, LENGTHS, number)
        for chunk in range(begin - start % CHUNK, end, CHUNK):
            first = gl.maximum(chunk, begin)
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(k_desc, [first, key_head * DIM], bar, k.index(stage))
            tma.async_copy_global_to_shared(q_desc, [first, key_head * DIM], bar, q.index(stage))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    v_desc, [first, head * DIM + half * HALF], bar, v.index(2 * stage + half)
                )
            tma.async_copy_global_to_shared(
                gates_desc, [(index * HV + head) * 4, 0], bar, gates.index(stage)
            )
            tma.async_copy_global_to_shared(
                solve_desc, [first, head * CHUNK], bar, solve.index(stage)
            )
            tma.async_copy_global_to_shared(p_desc, [first, head * CHUNK], bar, p.index(stage))
            # That of the chunk before: its place is free, since the stage of two before is.
            if count > 0:
                _copy_z(z_desc, z, z_full, count - 1, z_token, head)
            z_token = first
            count += 1
            index += 1
    if count > 0:
        if count > 2:
            last = count - 3  # whose z had the place
            mbarrier.wait(empty.index(last % STAGES), (last // STAGES) & 1)
        _copy_z(z_desc, z, z_full, count - 1, z_token, head)


@gluon.jit
def _chunk(s, tiles, full, o_full, count, tokens, group: gl.constexpr):
    """A chunk of so many tokens, for the columns of a warpgroup: o is left in the place of the
    values; -> the state after it.

    s [HALF, DIM] float32: the state's transpose
    """
    q, k, v, solve, p, gates, _z = tiles
    STAGES: gl.constexpr = q.shape[0]
    wide: gl.constexpr = s.type.layout
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    from_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    from_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    v, k, solve = v.index(2 * stage + group), k.index(stage), solve.index(stage)
    if tokens < CHUNK:  # both warpgroups do it, and write the same
        clear(v, tokens)
        clear(k, tokens)
        clear(solve, tokens)
        fence_async_shared()
    zeros = gl.zeros([HALF, CHUNK], gl.float32, narrow)
    values = v.permute((1, 0)).load(narrow)
    rounded = gl.convert_layout(s.to(k.dtype), from_narrow)
    r = warpgroup_mma(rounded, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    o = warpgroup_mma(rounded, q.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    decay = gates.index(stage).slice(0, 1, 0).load(narrow)
    final = gates.index(stage).slice(0, 1, 0).slice(CHUNK - 1, 1, 1).load(wide)
    s = s * final
    r = warpgroup_mma_wait(num_outstanding=1, deps=(r,))
    r = values.to(gl.float32) - r * decay
    r = gl.convert_layout(r.to(k.dtype), from_narrow)
    r = warpgroup_mma(r, solve.permute((1, 0)), zeros, use_acc=False, is_async=True)
    r, o = warpgroup_mma_wait(num_outstanding=0, deps=(r, o))
    left = gates.index(stage).slice(1, 1, 0).load(narrow)
    s = warpgroup_mma(gl.convert_layout((r * left).to(k.dtype), from_wide), k, s, is_async=True)
    o = warpgroup_mma(
        gl.convert_layout(r.to(k.dtype), from_narrow), p.index(stage).permute((1, 0)), o * decay,
        is_async=True,
    )  # fmt: skip
    s, o = warpgroup_mma_wait(num_outstanding=0, deps=(s, o))
    v.permute((1, 0)).store(o.to(k.dtype))
    mbarrier.arrive(o_full.index(stage), count=1)
    return s


@gluon.jit
def _multiply(
    tiles, full, o_full, STATE, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS, SLOTS,
    SNAPSHOTS_AT, SNAPSHOTS, state_slot, HV: gl.constexpr, SNAPSHOT: gl.constexpr,
    DEPENDENT: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its columns of the states."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    if DEPENDENT:
        gdc_wait()
    head = gl.program_id(0) % HV
    column = group * HALF + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    key = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    cell = head * (DIM * DIM) + key[None, :] * DIM + column[:, None]
    count = 0
    for number in range(gl.program_id(0) // HV, gl.load(COUNTS), gl.num_programs(0) // HV):
        row, _, begin, end, start = _row(ROWS, FIRST_CHUNKS, CU_SEQLENS, LENGTHS, number)
        slot = gl.load(SLOTS + row).to(gl.int64)
        continued = (start > 0) & (slot >= 0)
        s = gl.load(STATE + slot * state_slot + cell, mask=(cell >= 0) & continued, other=0.0)
        s = s.to(gl.float32)
        bound = begin - start % CHUNK
        kept, border, part = slot, end, 1
        if SNAPSHOT:
            kept = gl.load(SNAPSHOTS + row).to(gl.int64)
            border = begin - start + gl.load(SNAPSHOTS_AT + row)
            part = 1 - ((kept >= 0) & (border > begin) & (border <= end)).to(gl.int32)
        # Two parts if the state between them is kept.
        for of_row in range(part, 2):
            target, until = slot, end
            if of_row == 0:
                target, until = kept, border
            for chunk in range(bound, until, CHUNK):
                tokens = gl.minimum(chunk + CHUNK, end) - gl.maximum(chunk, begin)
                s = _chunk(s, tiles, full, o_full, count, tokens, group)
                count += 1
            if target >= 0:
                gl.store(STATE + target * state_slot + cell, s.to(STATE.dtype.element_ty))
            bound = until


@gluon.jit
def _norm(
    tiles, z_full, o_full, empty, NORM, OUT, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS, eps,
    HV: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: the gated norm of o, and the stages' release."""
    v, p, z = tiles[2], tiles[4], tiles[6]
    STAGES: gl.constexpr = p.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    head = gl.program_id(0) % HV
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    weight0 = gl.load(NORM + column).to(gl.float32)
    weight1 = gl.load(NORM + HALF + column).to(gl.float32)
    count = 0
    for number in range(gl.program_id(0) // HV, gl.load(COUNTS), gl.num_programs(0) // HV):
        _, _, begin, end, start = _row(ROWS, FIRST_CHUNKS, CU_SEQLENS, LENGTHS, number)
        for chunk in range(begin - start % CHUNK, end, CHUNK):
            first, last = gl.maximum(chunk, begin), gl.minimum(chunk + CHUNK, end)
            stage, place = count % STAGES, count % 2
            mbarrier.wait(z_full.index(place), (count // 2) & 1)
            mbarrier.wait(o_full.index(stage), (count // STAGES) & 1)
            for j in gl.static_range(CHUNK // 16):
                o0 = v.index(2 * stage).slice(j * 16, 16, 0).load(layout).to(gl.float32)
                o1 = v.index(2 * stage + 1).slice(j * 16, 16, 0).load(layout).to(gl.float32)
                z0 = z.index(2 * place).slice(j * 16, 16, 0).load(layout).to(gl.float32)
                z1 = z.index(2 * place + 1).slice(j * 16, 16, 0).load(layout).to(gl.float32)
                mean = (gl.sum(o0 * o0, 1) + gl.sum(o1 * o1, 1)) / DIM
                factor = gl.rsqrt(mean + eps)[:, None]
                token = first + j * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
                at = token.to(gl.int64)[:, None] * (HV * DIM) + (head * DIM + column)[None, :]
                real = (token < last)[:, None] & (column >= 0)[None, :]
                o0 = o0 * factor * weight0[None, :] * _silu(z0)
                gl.store(OUT + at, o0.to(OUT.dtype.element_ty), mask=real)
                o1 = o1 * factor * weight1[None, :] * _silu(z1)
                gl.store(OUT + at + HALF, o1.to(OUT.dtype.element_ty), mask=real)
            fence_async_shared()  # o was written where a copy comes next
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1


@gluon.jit
def _silu(x):
    """As that of convolution.py."""
    root = gl.rsqrt(1.0 + gl.exp2(x * -LOG2_E))
    return x * root * root


@gluon.jit
def _scan(
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc, NORM, STATE, CU_SEQLENS,
    LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, ROWS, FIRST_CHUNKS, COUNTS, OUT, eps, state_slot,
    HK: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr, SNAPSHOT: gl.constexpr,
    REGISTERS: gl.constexpr, NORM_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    k = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    v = gl.allocate_shared_memory(dtype, [2 * STAGES, CHUNK, HALF], swizzled)
    solve = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
    p = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
    z = gl.allocate_shared_memory(dtype, [4, CHUNK, HALF], swizzled)
    gates = gl.allocate_shared_memory(
        gl.float32, [STAGES, 2, CHUNK], gl.NVMMASharedLayout(0, 32, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(o_full.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(z_full.index(i), count=1)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc)
    tiles = (q, k, v, solve, p, gates, z)
    gl.warp_specialize(
        [
            (_multiply, (
                tiles, full, o_full, STATE, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS,
                LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot, HV, SNAPSHOT, DEPENDENT, 0,
            )),
            (_multiply, (
                tiles, full, o_full, STATE, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS,
                LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot, HV, SNAPSHOT, DEPENDENT, 1,
            )),
            (_norm, (
                tiles, z_full, o_full, empty, NORM, OUT, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS,
                LENGTHS, eps, HV, DEPENDENT,
            )),
            (_load, (
                descs, tiles, full, empty, z_full, ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS,
                HK, HV, DEPENDENT,
            )),
        ],
        [4, 4, 1], [REGISTERS, NORM_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
