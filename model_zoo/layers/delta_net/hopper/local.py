"""chunk_local on Hopper (sm_90), in Gluon.

_local: four warps have a chunk of a key head: its value heads one after the other.
  grid      programs * Hk: program p has key head p % Hk of one chunk after the other
  reads     q and k by TMA; gates
  writes    solve and p, and the last inputs of the convolution, as chunk_local.py does
  math      as chunk_local.py.  Products that depend on each other have their first matrix in the
            registers where the one before left it
  bound     latency: ten products that depend on each other, for each value head
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

from model_zoo.layers.delta_net.hopper.chunks import clear

DIM = gl.constexpr(128)  # of keys and of values
TAPS = gl.constexpr(4)  # of the convolution
CHUNK = gl.constexpr(64)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _product(a, b, acc, use_acc: gl.constexpr):
    """a from registers, or from shared memory; waited for."""
    product = warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(product,))


@gluon.jit
def _halves_between(y, column, first, last):
    """y [CHUNK, CHUNK] in float16, zero where not first <= column < last.

    In assembly, four instructions for two elements: the compiler would compute all masks before
    the loops, pack their bits into registers, and unpack them again.
    """
    return gl.inline_asm_elementwise(
        """{.reg .pred p; .reg .b32 both; setp.ge.s32 p, $3, $5; setp.lt.and.s32 p, $3, $7, p;
        cvt.rn.f16x2.f32 both, $2, $1; selp.b32 $0, both, 0, p;}""",
        "=r,f,f,r,r,r,r,r,r", [y, column, first, last], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _inverse(a, factors, inverses, zero):
    """(I - a)^-1 of a [CHUNK, CHUNK], strictly lower triangular but for its diagonal, which is not
    read.

    factors, inverses: float16 tiles
    zero:              a number that the compiler does not know, so that masks which depend on it
                       are computed here
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    zeros = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
    factors.store(a.to(gl.float16))
    difference = i - j + zero
    inverse = gl.where((i & 1) == 1, a, zeros)
    inverse = gl.where(difference == 1, inverse, zeros)
    inverse = gl.where(difference == 0, zeros + 1.0, inverse)
    for level in gl.static_range(1, 6):  # from blocks of 2 to one of 64
        x = inverse.to(gl.float16)
        inverses.store(x)
        fence_async_shared()
        y = _product(gl.convert_layout(x, operand), factors, zeros, False)
        # What is in the same larger block, and in the smaller one before.
        y = _halves_between(y, j + zero, i >> (level + 1) << (level + 1), i >> level << level)
        inverse = _product(gl.convert_layout(y, operand), inverses, inverse, True)
    return inverse


@gluon.jit
def _store(OUT, tile, token, head, tokens, HV: gl.constexpr):
    """The first rows of a tile [CHUNK, CHUNK], of so many tokens."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(tile.to(OUT.dtype.element_ty), wide)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, wide))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, wide))
    at = ((token + i).to(gl.int64) * HV + head)[:, None] * CHUNK + j[None, :]
    gl.store(OUT + at, values, mask=(i < tokens)[:, None] & (j >= 0)[None, :])


@gluon.jit
def _copy_inputs(
    QKV, OLD, TARGET, end, begin, start, has_slot, channel, qkv_row, CONV_DIM: gl.constexpr
):
    """The last inputs of `channel` before token `end`, from QKV, or from OLD if they are older."""
    x = ()
    for i in gl.static_range(TAPS):
        at = end - TAPS + i
        new = gl.load(
            QKV + at.to(gl.int64) * qkv_row + channel, mask=(channel >= 0) & (at >= begin),
            other=0.0,
        )  # fmt: skip
        position = start + at - begin
        old = gl.load(
            OLD + position % TAPS * CONV_DIM + channel,
            mask=(channel >= 0) & (at < begin) & (position >= 0) & has_slot, other=0.0,
        )  # fmt: skip
        x = x + (gl.where((channel >= 0) & (at >= begin), new, old),)  # noqa: RUF005
    for i in gl.static_range(TAPS):
        position = start + end - TAPS + i - begin
        target = TARGET + position % TAPS * CONV_DIM + channel
        gl.store(target, x[i], mask=(channel >= 0) & (position >= 0))


@gluon.jit
def _copy_last_inputs(
    QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, row, key_head, qkv_row,
    conv_slot, HK: gl.constexpr, HV: gl.constexpr, SNAPSHOT: gl.constexpr,
):  # fmt: skip
    """A row's last inputs of the convolution to its slot, and those before a snapshot to its.  Each
    channel is a thread's, which reads old inputs before it stores new ones."""
    GROUP: gl.constexpr = HV // HK
    CONV_DIM: gl.constexpr = (2 * HK + HV) * DIM
    dim = gl.arange(0, DIM, gl.BlockedLayout([1], [32], [4], [0]))
    begin, end = gl.load(CU_SEQLENS + row), gl.load(CU_SEQLENS + row + 1)
    start = gl.load(LENGTHS + row) - (end - begin)
    slot = gl.load(SLOTS + row).to(gl.int64)
    own = CONV + slot * conv_slot
    for i in range(2 + GROUP):
        head = gl.where(i < 2, i * HK + key_head, 2 * HK + key_head * GROUP + i - 2)
        channel = head * DIM + dim
        if SNAPSHOT:
            kept = gl.load(SNAPSHOTS + row).to(gl.int64)
            border = begin - start + gl.load(SNAPSHOTS_AT + row)
            if (kept >= 0) & (border > begin) & (border <= end):
                _copy_inputs(
                    QKV, own, CONV + kept * conv_slot, border, begin, start, slot >= 0,
                    channel, qkv_row, CONV_DIM,
                )  # fmt: skip
        if slot >= 0:
            _copy_inputs(QKV, own, own, end, begin, start, True, channel, qkv_row, CONV_DIM)


@gluon.jit
def _local(
    q_desc, k_desc, QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, CHUNKS, COUNTS,
    GATES, SOLVE, P, qkv_row, conv_slot, HK: gl.constexpr, HV: gl.constexpr,
    SNAPSHOT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HV // HK
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(q_desc.dtype, [CHUNK, DIM], swizzled)
    k = gl.allocate_shared_memory(q_desc.dtype, [CHUNK, DIM], swizzled)
    factors = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], swizzled)
    inverses = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    key_head = gl.program_id(0) % HK
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
    count = 0
    for index in range(gl.program_id(0) // HK, gl.load(COUNTS + 1), gl.num_programs(0) // HK):
        entry = CHUNKS + index * 3
        row, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        mbarrier.expect(full.index(0), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [first, key_head * DIM], full.index(0), k)
        tma.async_copy_global_to_shared(q_desc, [first, key_head * DIM], full.index(0), q)
        mbarrier.wait(full.index(0), count & 1)
        count += 1  # noqa: SIM113
        if last - first < CHUNK:
            clear(k, last - first)
            fence_async_shared()
        for number in range(GROUP):
            head = key_head * GROUP + number
            gate = GATES + (index * HV + head) * (4 * CHUNK)
            of_i, of_j = gl.load(gate + 2 * CHUNK + i), gl.load(gate + 2 * CHUNK + j)
            beta_i, beta_j = gl.load(gate + 3 * CHUNK + i), gl.load(gate + 3 * CHUNK + j)
            zero = (gl.load(gate + 3 * CHUNK) < 0.0).to(gl.int32)  # no step size is negative
            is_before = i[:, None] >= (j + zero)[None, :]
            decay = gl.exp2(gl.where(is_before, of_i[:, None] - of_j[None, :], float("-inf")))
            p = _product(q, k.permute((1, 0)), zeros, False) * decay
            _store(P, p, first, head, last - first, HV)
            system = _product(k, k.permute((1, 0)), zeros, False) * decay * -beta_i[:, None]
            solve = _inverse(system, factors, inverses, zero) * beta_j[None, :]
            _store(SOLVE, solve, first, head, last - first, HV)
        if last == gl.load(CU_SEQLENS + row + 1):
            _copy_last_inputs(
                QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, row, key_head,
                qkv_row, conv_slot, HK, HV, SNAPSHOT,
            )  # fmt: skip
