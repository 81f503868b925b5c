"""Device functions that the attention kernels share: logits, softmax epilogue, dot."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Initial running maximum of the online softmax: finite, so that no difference is NaN.
M_INIT = tl.constexpr(-1.0e30)


@triton.jit
def to_logits(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores q k^T -> logits in base 2, with softcap."""
    if SOFTCAP:
        doubled = scores * (2.0 * LOG2E * scale / softcap)
        return (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(doubled)))  # cap * tanh
    return scores * (scale * LOG2E)


@triton.jit
def finish(m, total, SINKS, heads, real):
    """Running maximum and sum in base 2 -> (factor of the accumulator, natural lse).

    A sink is one more logit without a value, added here once.
    """
    if SINKS is not None:
        sink = tl.load(SINKS + heads, mask=real, other=0.0) * LOG2E
        m_new = tl.maximum(m, sink)
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.exp2(sink - m_new)
        return shrink / total, (m_new + tl.log2(total)) * LN2
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return 1.0 / total, tl.where(empty, float("-inf"), (m + tl.log2(total)) * LN2)


# The interpreter multiplies bit patterns of bfloat16; products of two are exact in float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b (+ acc), summed in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
