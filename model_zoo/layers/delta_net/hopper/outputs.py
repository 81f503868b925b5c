"""What becomes of a chunk's o on Hopper (sm_90), in Gluon: by four warps of scan.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model_zoo.layers.delta_net.hopper.chunks import prompt_row, silu

HALF = gl.constexpr(64)  # columns of the state that a warpgroup has
DIM = gl.constexpr(128)  # of values
CHUNK = gl.constexpr(64)


@gluon.jit
def store_normed(
    tiles, z_full, o_full, empty, NORM, OUT, rows, eps, HV: gl.constexpr, DEPENDENT: gl.constexpr,
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
    for number in range(gl.program_id(0) // HV, gl.load(rows[2]), gl.num_programs(0) // HV):
        _, _, begin, end, start = prompt_row(rows, number)
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
                o0 = o0 * factor * weight0[None, :] * silu(z0)
                gl.store(OUT + at, o0.to(OUT.dtype.element_ty), mask=real)
                o1 = o1 * factor * weight1[None, :] * silu(z1)
                gl.store(OUT + at + HALF, o1.to(OUT.dtype.element_ty), mask=real)
            fence_async_shared()  # o was written where a copy comes next
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1


@gluon.jit
def store_outputs(
    tiles, o_full, empty, OUT, rows, HV: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    """o of 64 columns as it is, and the stages' release."""
    v, p = tiles[2], tiles[4]
    STAGES: gl.constexpr = p.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    part, parts = gl.program_id(0) % (2 * HV), gl.num_programs(0) // (2 * HV)
    column = part * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    count = 0
    for number in range(gl.program_id(0) // (2 * HV), gl.load(rows[2]), parts):
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
