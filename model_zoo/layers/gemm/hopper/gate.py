"""The gate in GEMMs on Hopper (sm_90), in Gluon.

tile_row    the weight's row that a row of a tile is, in GEMMs of few rows: of a gated weight a
            tile has gates, and as many ups of the same columns
gate_mul    silu(gate) * up of such a tile, or gelu(gate) * up
activation  silu or gelu alone, with an approximate reciprocal, in GEMMs of many rows
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_row(tile, r, N, HEIGHT: gl.constexpr, GATED: gl.constexpr):
    """Weight rows of rows r of a tile of HEIGHT rows; N / 2 gates are followed by N / 2 ups.

    Those of the last tile may be past the end: gates past N / 2, or ups past N.
    """
    if GATED:
        half: gl.constexpr = HEIGHT // 2
        return tile * half + r % half + r // half * (N // 2)
    return tile * HEIGHT + r


LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def activation(x, GATE: gl.constexpr):
    """silu(x) = x / (1 + exp(-x)), or gelu(x) by its approximation by tanh.

    The reciprocal is approximate, to a unit or two in the last place of float32; a division also
    serves denominators past 2^126, where the result is practically zero.
    """
    factor = x
    if GATE == "gelu":  # as in gate_mul
        factor = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(factor * -LOG2E)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def gate_mul(acc, GATE: gl.constexpr):
    """acc [2 * rows, M] float32, gates and then ups -> activation(gate) * up [rows, M].

    Nothing is rounded before the product, unlike in kernels/silu_mul.py, where PyTorch rounds.
    GATE  "silu", or "gelu": its approximation by tanh
    """
    both = acc.reshape([2, acc.shape[0] // 2, acc.shape[1]]).permute((1, 2, 0))
    together: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    gate, up = gl.split(gl.convert_layout(both, together))
    factor = gate
    if GATE == "gelu":  # (1 + tanh(z)) / 2 = sigmoid(2 z); 2 sqrt(2 / pi) = 1.5957691
        factor = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-factor)) * up
