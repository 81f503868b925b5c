"""Helpers of the Hopper (sm_90) Gluon kernels."""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.7 renamed it.
cta_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


def tma_desc(tensor: Tensor, box: list[int], swizzle: int = 128) -> TensorDescriptor:
    """A TMA descriptor of a tensor of 8, 16 or 32-bit elements; those out of bounds load as zeros.

    swizzle  bytes of a row that lie together in shared memory, where rows are at least that long
    """
    size = tensor.element_size()
    layout = _shared_layout(min(swizzle, size * box[-1]), 8 * size, len(box))
    return TensorDescriptor.from_tensor(tensor, box, layout)


@cache  # to make one takes as long as a fifth of a GEMM's launch
def _shared_layout(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


@gluon.jit
def write_partial(
    acc, m, total, PARTIAL_OUT, PARTIAL_LSE, slot, real, D: gl.constexpr, COLUMN: gl.constexpr = 0
):
    """Store a partial result for combine.py or merge_tiles.py; slot [rows] int64.

    COLUMN: the first column of the output that acc has
    """
    safe_total = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(safe_total))
    gl.store(PARTIAL_LSE + slot, lse, mask=real)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc / gl.convert_layout(safe_total, rows)[:, None]
    d = COLUMN + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = gl.convert_layout(slot, rows)[:, None] * D + d[None, :]
    inside = gl.convert_layout(real, rows)[:, None] & (d < D)[None, :]
    gl.store(PARTIAL_OUT + at, acc, mask=inside)
