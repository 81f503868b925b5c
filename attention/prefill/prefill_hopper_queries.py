"""The queries of prefill_hopper's consumers: half a tile, in parts of at most 128 columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attention.prefill.prefill_hopper_stages import HALF

EXPONENT = gl.constexpr(0x7F800000)  # of a float32
LARGEST = gl.constexpr(253 << 23)  # the largest power of two whose inverse is normal
SMALLEST = gl.constexpr(27 << 23)  # 2 ** -100: the factor of a row of zeros must not be 0
INVERSE = gl.constexpr(254 << 23)  # minus the bits of a power of two: the bits of its inverse


@gluon.jit
def parts_of(tiles, at, PARTS: gl.constexpr):
    """The parts of tile `at`."""
    parts = ()
    for part in gl.static_range(PARTS):
        parts = parts + (tiles.index(at * PARTS + part),)  # noqa: RUF005
    return parts


@gluon.jit
def fetch_queries(
    Q, tiles, packed, head, q_start, q_len, q_token, q_head, GROUP: gl.constexpr, D: gl.constexpr
):
    """Load half a tile of Q by pointers, where a group does not divide the TMA box."""
    BLOCK_D: gl.constexpr = tiles[0].shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    r = packed + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    at = (q_start + r // GROUP).to(gl.int64) * q_token + (head * GROUP + r % GROUP) * q_head
    for part in gl.static_range(len(tiles)):
        d = part * BLOCK_D + gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
        inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
        tiles[part].store(gl.load(Q + at[:, None] + d[None, :], mask=inside, other=0.0))
    fence_async_shared()


@gluon.jit
def queries_in_float16(stored, rows: gl.constexpr):
    """Convert Q's parts where they are -> (views as float16, the factor of each row [HALF]).

    A power of two scales each row into float16's range, which the factor of its scores undoes.
    """
    BLOCK_D: gl.constexpr = stored[0].shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    power = gl.zeros([HALF], gl.int32, gl.SliceLayout(1, wide))
    for part in gl.static_range(len(stored)):
        q = stored[part].load(wide).to(gl.float32)
        power = gl.maximum(power, gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) & EXPONENT)
    power = gl.minimum(gl.maximum(power, SMALLEST), LARGEST)
    inverse = (INVERSE - power).to(gl.float32, bitcast=True)[:, None]
    parts = ()
    for part in gl.static_range(len(stored)):
        part_of_q = stored[part]._reinterpret(gl.float16, [HALF, BLOCK_D], stored[part].layout)
        part_of_q.store((stored[part].load(wide).to(gl.float32) * inverse).to(gl.float16))
        parts = parts + (part_of_q,)  # noqa: RUF005
    fence_async_shared()
    return parts, gl.convert_layout(power.to(gl.float32, bitcast=True), rows)
