"""chunk_scan on Hopper (sm_90), in Gluon, with the gated norm where a program has a whole head.

_scan: a load warp, HALVES warpgroups that multiply, and one that stores.
  grid      programs * Hv * 2 / HALVES: a program has HALVES halves of 64 columns of the state of a
            value head, for one row after the other.  One half: twice as many multiprocessors have
            a program, and gated_norm.py follows.  Both: o is not stored and read again
  tiles     a ring of STAGES chunks: q, k [CHUNK, 128], solve, p [CHUNK, CHUNK], the values of each
            half [CHUNK, 64], gates [2, CHUNK]; with both halves a ring of two of z.  Tiles are
            CHUNK tokens, also of shorter chunks: what is beyond the chunk is cleared where it would
            be multiplied
  multiply  a warpgroup has a half, transposed, in registers, as chunk_scan.py says.  It writes its
            o to where its values were
  store     four warps: o of a chunk, or its gated norm; its stage is free then
  math      as chunk_scan.py and gated_norm.py: o is rounded to the type of qkv between them
  bound     of both halves: tensor cores of the multiprocessors that have a program, 2,048 cycles a
            chunk.  Of one: four products that depend on each other, about 1,400 cycles
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
from triton.language.extra.cuda import gdc_wait

from model_zoo.layers.delta_net.hopper.chunks import clear, prompt_row
from model_zoo.layers.delta_net.hopper.outputs import store_normed, store_outputs

HALF = gl.constexpr(64)  # columns of the state that a warpgroup has
DIM = gl.constexpr(128)  # of keys and of values
CHUNK = gl.constexpr(64)


@gluon.jit
def _part(HV: gl.constexpr, HALVES: gl.constexpr):
    """-> (the program's value head, the first of its halves; its first row, and how many rows are
    computed at once)."""
    PARTS: gl.constexpr = 2 // HALVES
    program = gl.program_id(0)
    part = program % (HV * PARTS)
    rows = gl.num_programs(0) // (HV * PARTS)
    return part // PARTS, part % PARTS * HALVES, program // (HV * PARTS), rows


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
    descs, tiles, full, empty, z_full, rows, HK: gl.constexpr, HV: gl.constexpr,
    HALVES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp."""
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc = descs
    SQUARES: gl.constexpr = q_desc.block_type.nbytes + p_desc.block_type.nbytes
    OTHERS: gl.constexpr = HALVES * v_desc.block_type.nbytes + gates_desc.block_type.nbytes
    q, k, v, solve, p, gates, z = tiles
    STAGES: gl.constexpr = q.shape[0]
    if DEPENDENT:
        gdc_wait()
    head, part, first_row, row_step = _part(HV, HALVES)
    key_head = head // (HV // HK)
    count, z_token = 0, 0
    for number in range(first_row, gl.load(rows[2]), row_step):
        _, index, begin, end, start = prompt_row(rows, number)
        for chunk in range(begin - start % CHUNK, end, CHUNK):
            first = gl.maximum(chunk, begin)
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * SQUARES + OTHERS)
            tma.async_copy_global_to_shared(k_desc, [first, key_head * DIM], bar, k.index(stage))
            tma.async_copy_global_to_shared(q_desc, [first, key_head * DIM], bar, q.index(stage))
            for half in gl.static_range(HALVES):
                column = head * DIM + (part + half) * HALF
                tma.async_copy_global_to_shared(
                    v_desc, [first, column], bar, v.index(HALVES * stage + half)
                )
            tma.async_copy_global_to_shared(
                gates_desc, [(index * HV + head) * 4, 0], bar, gates.index(stage)
            )
            tma.async_copy_global_to_shared(
                solve_desc, [first, head * CHUNK], bar, solve.index(stage)
            )
            tma.async_copy_global_to_shared(p_desc, [first, head * CHUNK], bar, p.index(stage))
            # That of the chunk before: its place is free, since the stage of two before is.
            if HALVES == 2:  # noqa: SIM102 - otherwise there is no z
                if count > 0:
                    _copy_z(z_desc, z, z_full, count - 1, z_token, head)
            z_token = first
            count += 1
            index += 1
    if HALVES == 2:  # noqa: SIM102
        if count > 0:
            if count > 2:
                last = count - 3  # whose z had the place
                mbarrier.wait(empty.index(last % STAGES), (last // STAGES) & 1)
            _copy_z(z_desc, z, z_full, count - 1, z_token, head)


@gluon.jit
def _chunk(
    s, tiles, full, o_full, count, tokens, group: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
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
    v, k, solve = v.index(HALVES * stage + group), k.index(stage), solve.index(stage)
    if tokens < CHUNK:  # each warpgroup does it, and writes the same
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
    tiles, full, o_full, states, rows, HV: gl.constexpr, SNAPSHOT: gl.constexpr,
    HALVES: gl.constexpr, DEPENDENT: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its columns of the states."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STATE, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot = states
    if DEPENDENT:
        gdc_wait()
    head, part, first_row, row_step = _part(HV, HALVES)
    column = (part + group) * HALF + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    key = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    cell = head * (DIM * DIM) + column[:, None] * DIM + key[None, :]
    count = 0
    for number in range(first_row, gl.load(rows[2]), row_step):
        row, _, begin, end, start = prompt_row(rows, number)
        slot = gl.load(SLOTS + row).to(gl.int64)
        continued = (start > 0) & (slot >= 0)
        s = gl.load(STATE + slot * state_slot + cell, mask=(cell >= 0) & continued, other=0.0)
        s = s.to(gl.float32)
        begin_chunk = begin - start % CHUNK
        kept, border, part_of_row, last_part = slot, end, 1, begin_chunk
        if SNAPSHOT:
            kept = gl.load(SNAPSHOTS + row).to(gl.int64)
            border = begin - start + gl.load(SNAPSHOTS_AT + row)
            part_of_row = 1 - ((kept >= 0) & (border > begin) & (border <= end)).to(gl.int32)
            last_part = gl.where(part_of_row == 0, border, begin_chunk)
        # Two parts if the state between them is kept.  The second one's beginning is not carried
        # by the loop: chunk_scan.py says why.
        for of_row in range(part_of_row, 2):
            target, since, until = slot, last_part, end
            if of_row == 0:
                target, since, until = kept, begin_chunk, border
            for chunk in range(since, until, CHUNK):
                tokens = gl.minimum(chunk + CHUNK, end) - gl.maximum(chunk, begin)
                s = _chunk(s, tiles, full, o_full, count, tokens, group, HALVES)
                count += 1
            if target >= 0:
                gl.store(STATE + target * state_slot + cell, s.to(STATE.dtype.element_ty))


@gluon.jit
def _scan(
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc, NORM, STATE, CU_SEQLENS,
    LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, ROWS, FIRST_CHUNKS, COUNTS, OUT, eps, state_slot,
    HK: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr, SNAPSHOT: gl.constexpr,
    HALVES: gl.constexpr, REGISTERS: gl.constexpr, STORE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    k = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    v = gl.allocate_shared_memory(dtype, [HALVES * STAGES, CHUNK, HALF], swizzled)
    solve = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
    p = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
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
        mbarrier.init(o_full.index(i), count=HALVES)
    for i in gl.static_range(2):
        mbarrier.init(z_full.index(i), count=1)
    fence_async_shared()
    rows = (ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS)
    descs = (q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, z_desc)
    states = (STATE, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot)
    if HALVES == 2:
        z = gl.allocate_shared_memory(dtype, [4, CHUNK, HALF], swizzled)
        tiles = (q, k, v, solve, p, gates, z)
        gl.warp_specialize(
            [
                (_multiply, (tiles, full, o_full, states, rows, HV, SNAPSHOT, 2, DEPENDENT, 0)),
                (_multiply, (tiles, full, o_full, states, rows, HV, SNAPSHOT, 2, DEPENDENT, 1)),
                (store_normed, (tiles, z_full, o_full, empty, NORM, OUT, rows, eps, HV, DEPENDENT)),
                (_load, (descs, tiles, full, empty, z_full, rows, HK, HV, 2, DEPENDENT)),
            ],
            [4, 4, 1], [REGISTERS, STORE_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        tiles = (q, k, v, solve, p, gates, v)
        gl.warp_specialize(
            [
                (_multiply, (tiles, full, o_full, states, rows, HV, SNAPSHOT, 1, DEPENDENT, 0)),
                (store_outputs, (tiles, o_full, empty, OUT, rows, HV, DEPENDENT)),
                (_load, (descs, tiles, full, empty, z_full, rows, HK, HV, 1, DEPENDENT)),
            ],
            [4, 1], [STORE_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
