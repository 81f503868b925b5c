"""What the Hopper kernels of experts do with the sums of a tile, in Gluon.

weighted     sums times the scales of their rows, plus the bias
activated    as expert_tile.py has it
write_inner  of the first product: activated values of a tile's rows of x
write_pairs  of the second: a tile's outputs times the weights of their pairs
write_row    the same, of one token and of a part of the columns
add_rows     one token's outputs, of all experts and parts, added by the last program to arrive
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from attention.common.hopper import cta_barrier
from model_zoo.layers.quantized_gemm.hopper.scales import HEIGHT
from model_zoo.moe_config import CLAMP_ALPHA, CLAMP_LIMIT

LIMIT, ALPHA = gl.constexpr(CLAMP_LIMIT), gl.constexpr(CLAMP_ALPHA)
ALL = gl.constexpr(PropagateNan.ALL)  # of maximum and minimum, as PyTorch's
HALF = gl.constexpr(32)  # gates of a warpgroup's tile


@gluon.jit
def weighted(acc, ROW_SCALES, BIAS, expert, n, outputs, FACTOR: gl.constexpr, bias_factor=1.0):
    """acc [HEIGHT, WIDTH] of rows n of an expert's weight; bias_factor: 0 without the bias."""
    at = expert.to(gl.int64) * outputs + n
    if ROW_SCALES is not None:
        acc = acc * (gl.load(ROW_SCALES + at).to(gl.float32) * FACTOR)[:, None]
    elif FACTOR != 1.0:
        acc = acc * FACTOR
    if BIAS is not None:
        acc = acc + (gl.load(BIAS + at).to(gl.float32) * bias_factor)[:, None]
    return acc


@gluon.jit
def sigmoid(z):
    return 1.0 / (1.0 + gl.exp(-gl.maximum(z, -80.0, ALL)))  # exp of more would be infinite


@gluon.jit
def activated(gate, up, ACTIVATION: gl.constexpr):
    """In float32."""
    if ACTIVATION == "silu_mul":
        y = gate * sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh_mul":
        # (1 + tanh(z)) / 2 = sigmoid(2 z); 2 sqrt(2 / pi) = 1.5957691
        y = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = gl.minimum(gate, LIMIT, ALL)
        up = gl.minimum(gl.maximum(up, -LIMIT, ALL), LIMIT, ALL)
        y = (up + 1.0) * gate * sigmoid(gate * ALPHA)
    return y


@gluon.jit
def write_inner(sums, OUT, row, real, first, inner, ACTIVATION: gl.constexpr):
    """Rows row .. row + real of OUT [*, inner], columns of run `first` of HALF gates.

    sums  [HEIGHT, WIDTH]: gates, then their ups
    """
    WIDTH: gl.constexpr = sums.shape[1]
    # A warp has consecutive columns of a row of OUT.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    pairs = sums.reshape([2, HALF, WIDTH]).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(pairs, layout))
    y = activated(gate, up, ACTIVATION)
    both: gl.constexpr = gl.SliceLayout(2, layout)
    n = first * HALF + gl.arange(0, HALF, gl.SliceLayout(1, both))
    m = gl.arange(0, WIDTH, gl.SliceLayout(0, both))
    at = OUT + (row + m).to(gl.int64)[None, :] * inner + n[:, None]
    mask = (n < inner)[:, None] & (m < real)[None, :]
    gl.store(at, y.to(OUT.dtype.element_ty), mask=mask)


@gluon.jit
def write_pairs(
    sums, PARTS, PAIRS, SCORES, expert, number, real, first, tokens, outputs
):  # fmt: skip
    """PARTS [pairs, outputs], of run `first` of HEIGHT outputs.

    number  of the tile among its expert's
    """
    WIDTH: gl.constexpr = sums.shape[1]
    n = first * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, sums.type.layout))
    m = gl.arange(0, WIDTH, gl.SliceLayout(0, sums.type.layout))
    mine = PAIRS + expert.to(gl.int64) * tokens + number * WIDTH
    pair = gl.load(mine + m, mask=m < real, other=0, cache_modifier=".cg")
    score = gl.load(SCORES + pair, mask=m < real, other=0.0, cache_modifier=".cg")
    at = PARTS + pair.to(gl.int64)[None, :] * outputs + n[:, None]
    y = (sums * score[None, :]).to(PARTS.dtype.element_ty)
    gl.store(at, y, mask=(n < outputs)[:, None] & (m < real)[None, :])


@gluon.jit
def write_row(sums, PARTS, SCORES, place, first, outputs, SPLITS: gl.constexpr):
    """Row `place` of PARTS [*, outputs] float32, of run `first` of HEIGHT outputs: sums[:, 0] times
    the weight of the expert."""
    score = gl.load(SCORES + place // SPLITS, cache_modifier=".cg")
    n = first * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, sums.type.layout))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    at = PARTS + place * outputs + n[:, None] + m[None, :]
    gl.store(at, sums * score, mask=(n < outputs)[:, None] & (m == 0)[None, :])


@gluon.jit
def add_rows(acc, PARTS, ARRIVED, SHARED, SHARED_GATE, OUT, first, outputs, COUNT: gl.constexpr):
    """OUT [outputs] of one token, of run `first` of HEIGHT outputs, when all COUNT rows of PARTS
    are there."""
    cta_barrier()
    arrived = gl.atomic_add(ARRIVED + first, 1)
    if arrived == COUNT - 1:
        n = first * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, acc.type.layout))
        exists = n < outputs
        total = n.to(gl.float32) * 0.0
        for j in gl.static_range(COUNT):
            at = PARTS + j * outputs + n
            total += gl.load(at, mask=exists, other=0.0, cache_modifier=".cg")
        if SHARED is not None:
            added = gl.load(SHARED + n, mask=exists, other=0.0).to(gl.float32)
            if SHARED_GATE is not None:
                added *= sigmoid(gl.load(SHARED_GATE).to(gl.float32))
            total += added
        gl.store(OUT + n, total.to(OUT.dtype.element_ty), mask=exists)
        gl.store(ARRIVED + first, 0)  # for the next layer
