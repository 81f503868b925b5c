"""chunk_scan on Hopper (sm_90), in Gluon; gated_norm.py follows.

_scan: a load warp, a warpgroup that multiplies, and four warps that store.
  grid      programs * Hv * 2: a program has 64 columns of the state of a value head, a half, for
            one row after the other
  tiles     a ring of STAGES chunks: q, k [CHUNK, 128], solve, p [CHUNK, CHUNK], the values of the
            half [CHUNK, 64], gates [2, CHUNK].  Tiles are CHUNK tokens, also of shorter chunks:
            what is beyond the chunk is cleared where it would be multiplied
  multiply  the half, transposed, is in registers, as chunk_scan.py says.  o is written to where the
            values were
  store     o of a chunk, whose stage is free then
  math      as chunk_scan.py
  bound     four products that depend on each other, about 1,400 cycles a chunk
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

from model_zoo.layers.delta_net.hopper.chunks import clear, prompt_row

HALF = gl.constexpr(64)  # columns of the state that a program has
DIM = gl.constexpr(128)  # of keys and of values
CHUNK = gl.constexpr(64)


@gluon.jit
def _part(HV: gl.constexpr):
    """-> (the program's value head, and which half of it; its first row, and how many rows are
    computed at once)."""
    program = gl.program_id(0)
    part = program % (2 * HV)
    return part // 2, part % 2, program // (2 * HV), gl.num_programs(0) // (2 * HV)


@gluon.jit
def _load(
    descs, tiles, full, empty, rows, HK: gl.constexpr, HV: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    """The load warp."""
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc = descs
    SQUARES: gl.constexpr = q_desc.block_type.nbytes + p_desc.block_type.nbytes
    OTHERS: gl.constexpr = v_desc.block_type.nbytes + gates_desc.block_type.nbytes
    q, k, v, solve, p, gates = tiles
    STAGES: gl.constexpr = q.shape[0]
    if DEPENDENT:
        gdc_wait()
    head, half, first_row, row_step = _part(HV)
    key_head = head // (HV // HK)
    count = 0
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
            column = head * DIM + half * HALF
            tma.async_copy_global_to_shared(v_desc, [first, column], bar, v.index(stage))
            tma.async_copy_global_to_shared(
                gates_desc, [(index * HV + head) * 4, 0], bar, gates.index(stage)
            )
            tma.async_copy_global_to_shared(
                solve_desc, [first, head * CHUNK], bar, solve.index(stage)
            )
            tma.async_copy_global_to_shared(p_desc, [first, head * CHUNK], bar, p.index(stage))
            count += 1
            index += 1


@gluon.jit
def _chunk(s, tiles, full, o_full, count, tokens):
    """A chunk of so many tokens: o is left in the place of the values; -> the state after it.

    s [HALF, DIM] float32: the state's transpose
    """
    q, k, v, solve, p, gates = tiles
    STAGES: gl.constexpr = q.shape[0]
    wide: gl.constexpr = s.type.layout
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    from_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    from_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    v, k, solve = v.index(stage), k.index(stage), solve.index(stage)
    if tokens < CHUNK:
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
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the program's columns of the states."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STATE, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot = states
    if DEPENDENT:
        gdc_wait()
    head, half, first_row, row_step = _part(HV)
    column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, wide))
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
                s = _chunk(s, tiles, full, o_full, count, tokens)
                count += 1
            if target >= 0:
                gl.store(STATE + target * state_slot + cell, s.to(STATE.dtype.element_ty))


@gluon.jit
def _store_outputs(tiles, o_full, empty, OUT, rows, HV: gl.constexpr, DEPENDENT: gl.constexpr):
    """Four warps: o of 64 columns, and the stages' release."""
    v = tiles[2]
    STAGES: gl.constexpr = v.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    head, half, first_row, row_step = _part(HV)
    column = head * DIM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    count = 0
    for number in range(first_row, gl.load(rows[2]), row_step):
        _, _, begin, end, start = prompt_row(rows, number)
        for chunk in range(begin - start % CHUNK, end, CHUNK):
            first, last = gl.maximum(chunk, begin), gl.minimum(chunk + CHUNK, end)
            stage = count % STAGES
            token = first + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
            at = token.to(gl.int64)[:, None] * (HV * DIM) + column[None, :]
            real = (token < last)[:, None] & (column >= 0)[None, :]
            mbarrier.wait(o_full.index(stage), (count // STAGES) & 1)
            o = v.index(stage).load(layout)
            fence_async_shared()  # o was written where a copy comes next
            mbarrier.arrive(empty.index(stage), count=1)
            gl.store(OUT + at, o, mask=real)
            count += 1


@gluon.jit
def _scan(
    q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc, STATE, CU_SEQLENS, LENGTHS, SLOTS,
    SNAPSHOTS_AT, SNAPSHOTS, ROWS, FIRST_CHUNKS, COUNTS, OUT, state_slot, HK: gl.constexpr,
    HV: gl.constexpr, STAGES: gl.constexpr, SNAPSHOT: gl.constexpr,
    STORE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    k = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], swizzled)
    v = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, HALF], swizzled)
    solve = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
    p = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], swizzled)
    gates = gl.allocate_shared_memory(
        gl.float32, [STAGES, 2, CHUNK], gl.NVMMASharedLayout(0, 32, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(o_full.index(i), count=1)
    fence_async_shared()
    rows = (ROWS, FIRST_CHUNKS, COUNTS, CU_SEQLENS, LENGTHS)
    descs = (q_desc, k_desc, v_desc, solve_desc, p_desc, gates_desc)
    states = (STATE, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, state_slot)
    tiles = (q, k, v, solve, p, gates)
    gl.warp_specialize(
        [
            (_multiply, (tiles, full, o_full, states, rows, HV, SNAPSHOT, DEPENDENT)),
            (_store_outputs, (tiles, o_full, empty, OUT, rows, HV, DEPENDENT)),
            (_load, (descs, tiles, full, empty, rows, HK, HV, DEPENDENT)),
        ],
        [4, 1], [STORE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
