"""Device functions of decode_hopper's compute warps.

float8_e4m3fn pages are loaded as int16 pairs and multiplied as two halves: the even columns of K or
V, and the odd ones.  So ldmatrix, which moves 16 bits at a time, brings K and V to the threads that
multiply them, V transposed; a byte permutation and two conversions make four float16 elements,
exactly, as float16 has float8's range and more mantissa bits than bfloat16; queries are scaled
into its range by a power of two per row, which the logits' factor undoes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from attention.common.softmax import LN2, LOG2E

EXPONENT = gl.constexpr(0x7F800000)  # of a float32
LARGEST = gl.constexpr(253 << 23)  # the largest power of two whose inverse is normal
INVERSE = gl.constexpr(254 << 23)  # minus the bits of a power of two: the bits of its inverse


@gluon.jit
def _load_queries(
    Q, q_start, q_len, head, q_token, q_head,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The row's packed queries of a KV head [BLOCK_Q, BLOCK_D], padded with zeros."""
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [WARPS, 1], [1, 0]
    )
    r = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, wide))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    at = (q_start + r // GROUP).to(gl.int64) * q_token
    at += (head * GROUP + r % GROUP) * q_head
    inside = (r < q_len * GROUP)[:, None] & (d < D)[None, :]
    return gl.load(Q + at[:, None] + d[None, :], mask=inside, other=0.0)


@gluon.jit
def fetch_queries(
    Q, q_start, q_len, head, q_token, q_head, factor, left: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """-> (queries, with float8 as even and odd columns; the factor from scores to logits)."""
    q = _load_queries(Q, q_start, q_len, head, q_token, q_head, GROUP, BLOCK_Q, D, BLOCK_D)
    if PAIRS:
        q = q.to(gl.float32)
        power = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) & EXPONENT
        power = gl.minimum(power, LARGEST)
        q = (q * (INVERSE - power).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        rows: gl.constexpr = gl.SliceLayout(1, left.parent)
        power = gl.convert_layout(power.to(gl.float32, bitcast=True), rows)
        factor = (power * factor)[:, None]
        even, odd = gl.split(q.reshape([BLOCK_Q, BLOCK_D // 2, 2]))
        q = (gl.convert_layout(even, left), gl.convert_layout(odd, left))
    else:
        q = (gl.convert_layout(q, left),)
    return q, factor


@gluon.jit
def _numbers(stored, PAIRS: gl.constexpr):
    """Stored elements as MMA operands, with float8 as even and odd columns."""
    if PAIRS:
        found = gl.inline_asm_elementwise(
            """{
            .reg .b32 sorted; .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r", [stored], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = (stored,)
    return found


@gluon.jit
def scores(q, k, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, PAIRS: gl.constexpr):
    """q of `fetch_queries`, k as stored, transposed -> q k^T [BLOCK_Q, BLOCK_N]."""
    layout: gl.constexpr = q[0].type.layout.parent
    k = _numbers(k, PAIRS)
    s = gl.zeros([BLOCK_Q, BLOCK_N], gl.float32, layout)
    for half in gl.static_range(len(q)):
        s = mma_v2(q[half], k[half], s)
    return s


@gluon.jit
def no_values(
    layout: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, PAIRS: gl.constexpr
):
    """The zero accumulator of add_values."""
    if PAIRS:
        half = gl.zeros([BLOCK_Q, BLOCK_D // 2], gl.float32, layout)
        acc = (half, half)
    else:
        acc = (gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout),)
    return acc


@gluon.jit
def add_values(acc, alpha, p, v, PAIRS: gl.constexpr):
    """acc * alpha + p v, v as stored; with float8, acc is (even columns, odd columns)."""
    v = _numbers(v, PAIRS)
    if PAIRS:
        acc = (mma_v2(p, v[0], acc[0] * alpha[:, None]), mma_v2(p, v[1], acc[1] * alpha[:, None]))
    else:
        acc = (mma_v2(p, v[0], acc[0] * alpha[:, None]),)
    return acc


@gluon.jit
def columns(acc, V_SCALE, head, PAIRS: gl.constexpr):
    """The accumulator with columns in order, times the scale of float8 values."""
    if PAIRS:
        found = gl.join(acc[0], acc[1]).reshape([acc[0].shape[0], 2 * acc[0].shape[1]])
        if V_SCALE is not None:
            found = found * gl.load(V_SCALE + head)
    else:
        found = acc[0]
    return found


@gluon.jit
def weights(
    s, m, start, end, position, factor, softcap,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores of a block -> (softmax weights, new maximum, rescaling factor alpha).

    factor: from scores to logits in base 2, a scalar or [BLOCK_Q, 1].
    """
    if SOFTCAP:
        doubled = s * (2.0 * factor / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + gl.exp2(doubled)))
    else:
        s = s * factor
    key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = (key < end)[None, :]
    if MASKED:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    return gl.exp2(s - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def zero_outside(v, start, end, lowest, WINDOW: gl.constexpr):
    """Zero the values that no query sees: they may be NaN, and 0 * NaN is NaN."""
    outside = start + v.shape[0] > end
    if WINDOW > 0:
        outside = outside | (start < lowest)
    if outside:
        key = start + gl.arange(0, v.shape[0], gl.SliceLayout(1, v.type.layout))
        valid = key < end
        if WINDOW > 0:
            valid = valid & (key >= lowest)
        v = gl.where(valid[:, None], v, gl.zeros_like(v))
    return v


@gluon.jit
def write_whole(
    acc, m, total, OUT, LSE, SINKS, token, heads, real, out_token, out_head, lse_token,
    D: gl.constexpr,
):  # fmt: skip
    """Store out and lse of a row that is not split."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    if SINKS is not None:
        sink = gl.load(SINKS + heads, mask=real, other=0.0) * LOG2E
        m_new = gl.maximum(m, sink)
        shrink = gl.exp2(m - m_new)
        total = total * shrink + gl.exp2(sink - m_new)
        acc = acc * gl.convert_layout(shrink, rows)[:, None]
        m = m_new
    safe_total = gl.where(total == 0.0, 1.0, total)
    acc = acc / gl.convert_layout(safe_total, rows)[:, None]
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = gl.convert_layout(token * out_token + heads * out_head, rows)[:, None] + d[None, :]
    inside = gl.convert_layout(real, rows)[:, None] & (d < D)[None, :]
    gl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=inside)
    if LSE is not None:
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(safe_total)) * LN2)
        gl.store(LSE + token * lse_token + heads, lse, mask=real)
